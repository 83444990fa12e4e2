"""A stage's state moves in memory: another stage goes on from it bit for bit, or says why not."""

import pytest
import torch
from test_narrow import EMBEDDING, MODES

from settings_values import EXACT
from thinwire.engine.checkpoint import Snapshot
from thinwire.engine.state import StageState
from trained import trained_chain
from whole_state import fingerprint, snapshot

MEMORY = {"codec__forward": "topk(0.2)+ef21", "codec__backward": "topk(0.2)+ef"}
CASES = {
    "dense": EXACT,
    "remembering": {**EXACT, **MEMORY},
    "muon": {**EXACT, "optim__name": "muon"},
    **{mode: {**EXACT, **MODES[mode]} for mode in MODES if "moving" in mode or "own" in mode},
    **{mode: {**EXACT, **changes} for mode, changes in EMBEDDING.items()},
    "moving and remembering": {**EXACT, **MODES["subspace-moving"], **MEMORY},
}


def stop_in_the_second_step(worker):
    backwards = iter(range(10**9))

    def count(_):
        if next(backwards) == worker.settings.pipeline.microbatches:
            worker.stop_requested.set()

    next(worker.stage.parameters()).register_hook(count)


def moved(settings, run):
    """Stop after two steps, go on with fresh stages: they end as those that never stopped."""
    whole = run(settings)
    stopped = run(settings, prepare_worker=stop_in_the_second_step)
    states = [worker.state for worker in stopped.workers]
    snapshots, prints = [snapshot(s, settings) for s in states], [fingerprint(s) for s in states]

    def restore(worker):
        assert fingerprint(worker.state) != prints[worker.index]
        worker.state.restore(snapshots[worker.index])
        assert fingerprint(worker.state) == prints[worker.index]

    resumed = run(settings, prepare_worker=restore)
    assert stopped.losses() + resumed.losses() == whole.losses()
    assert len(stopped.losses()) == 2
    for ours, theirs in zip(resumed.workers, whole.workers, strict=True):
        assert ours.state.step == theirs.state.step == settings.train.steps
        assert fingerprint(ours.state) == fingerprint(theirs.state)


@pytest.mark.parametrize("case", CASES)
def test_fresh_stages_go_on_from_states_in_memory(case, make_settings, run_in_threads):
    moved(make_settings(pipeline__stages=3, train__steps=5, **CASES[case]), run_in_threads)


@pytest.fixture
def chain(make_settings, corpus):
    settings = make_settings(pipeline__stages=3, train__steps=6, **CASES["moving and remembering"])
    return trained_chain(settings, corpus, 0)


def states_of(chain):
    """The state of each stage, with its ends of the cuts below and above."""
    lower = [[cut.lower] for cut in chain.cuts] + [[]]
    upper = [[], *([cut.upper] for cut in chain.cuts)]
    parts = zip(chain.updates, lower, upper, strict=True)
    return [StageState(u, [*below, *above]) for u, below, above in parts]


@pytest.mark.parametrize("done", [0, 2])
def test_steps_can_be_undone(done, chain):
    """A state of the start has no moments and no memory: those of later steps must go."""
    states = states_of(chain)
    for step in range(done):
        chain.train_step(step)
    before, prints = [snapshot(s, chain.settings) for s in states], [*map(fingerprint, states)]
    first = [chain.train_step(step) for step in range(done, 5)]
    assert all(fingerprint(s) != p for s, p in zip(states, prints, strict=True))
    for _ in range(2):  # a snapshot is not used up
        for state, whole in zip(states, before, strict=True):
            state.restore(whole)
        assert [fingerprint(state) for state in states] == prints
        assert [chain.train_step(step) for step in range(done, 5)] == first


def altered(snapshot, change):
    tensors = snapshot.tensors(snapshot.names())
    change(tensors)
    return Snapshot(tensors, snapshot.settings, snapshot.step, snapshot.versions)


def test_every_tensor_and_every_fact_counts(chain):
    chain.train_step(0)
    chain.train_step(1)
    for state in states_of(chain):
        whole, print = snapshot(state, chain.settings), fingerprint(state)
        names = whole.names()
        kinds = {name.split("/")[0] for name in names if "/" in name}
        assert kinds == {"optimizer", "space", "codec"}
        for name in names:

            def flip(tensors, name=name):
                tensors[name].flatten().view(torch.uint8)[0] ^= 1

            state.restore(altered(whole, flip))
            assert fingerprint(state) != print, name
        state.restore(whole)
        assert fingerprint(state) == print
        whole.step += 1
        state.restore(whole)
        assert fingerprint(state) != print


def test_a_file_holds_no_copies_of_what_the_stage_below_saves(make_settings, run_in_threads):
    for case in ("subspace-moving", "subspace-embedding"):
        settings = make_settings(pipeline__stages=3, **CASES[case])
        states = [worker.state for worker in run_in_threads(settings).workers]
        saved = [name for state in states for name in state.shard()]
        assert len(saved) == len(set(saved))
        assert set(saved) == {name for state in states for name in state.tensors()}
        copies = [sorted(state.tensors().keys() - state.shard().keys()) for state in states]
        assert copies[0] == [] and all(copies[1:])
