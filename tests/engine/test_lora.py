"""LoRA: adapters are trained beside frozen weights, in the pipeline as in one process."""

import pytest
import torch
from engine_runs import CPU
from test_chain import assert_same, trained
from test_narrow import MODES

from settings_values import EXACT
from thinwire.engine.build import Joined
from thinwire.engine.checkpoint import Snapshot, Versions
from thinwire.engine.conversion import merged
from thinwire.engine.feed import Feed
from thinwire.engine.state import restore_weights
from thinwire.engine.step_end import StageUpdate
from thinwire.model.layers import is_adapter
from thinwire_lab.chain import Chain
from trained import trained_chain
from whole_state import are_equal

LORA = {"lora__rank": 3, "lora__alpha": 6.0}
CASES = {
    "dense": EXACT,
    "muon": {**EXACT, "optim__name": "muon"},
    "bf16": {"run__precision": "bf16", "codec__forward": "bf16", "codec__backward": "bf16"},
    **{m: {**EXACT, **MODES[m]}
       for m in ("subspace", "reparam", "projected-moving", "projected-narrow-table")},
}  # fmt: skip


def parameters(chain):
    return {n: p for stage in chain.stages for n, p in stage.owned_parameters().items()}


@pytest.mark.parametrize("case", CASES)
def test_adapters_learn_and_all_else_stays(case, make_settings, run_in_threads, corpus):
    """The pipeline equals the chain bit for bit; of the model's own weights not a bit changes."""
    settings = make_settings(pipeline__stages=3, train__steps=3, **CASES[case], **LORA)
    feed = Feed(corpus, settings, CPU)
    start = {n: p.detach().clone() for n, p in parameters(Chain(settings, feed)).items()}
    outcome = run_in_threads(settings)
    assert_same(outcome, *trained(settings, feed))
    weights = {n: p for w in outcome.workers for n, p in w.stage.owned_parameters().items()}
    assert weights.keys() == start.keys()
    changed = {name for name in start if not torch.equal(start[name], weights[name])}
    due = {name for name in start if is_adapter(name) or name.startswith("boundary.")}
    assert changed == due and len(due) >= 4 * 7 * 2
    moments = (name for w in outcome.workers for name in w.update.optimizer.state_tensors())
    kept = {name.rpartition("/")[0] for name in moments}
    assert kept == due, "moments are kept of what is trained, and of nothing else"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fresh_adapter_changes_nothing_and_does_not_depend_on_the_split(
    precision, make_settings, corpus
):
    """With bf16 frozen matrices are held as autocast would round them: not a bit differs."""
    same = {**EXACT, "run__precision": precision}
    plain = make_settings(**same)
    ids = Feed(corpus, plain, CPU).training(0, 0).inputs
    starts = []
    for stages in (1, 4):
        settings = make_settings(**same, **LORA, pipeline__stages=stages)
        chain = Chain(settings)
        assert torch.equal(chain.logits(ids), Chain(plain).logits(ids))
        starts.append(parameters(chain))
    assert are_equal(*starts)
    frozen = {p.dtype for name, p in starts[0].items() if name.endswith("proj.weight")}
    assert frozen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    downs = [p for name, p in starts[0].items() if ".lora_A." in name]
    assert len({p.sum().item() for p in downs}) == len(downs), "each is drawn by its own name"


@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_at_full_rank_is_a_step_of_the_matrix_itself(frozen, make_settings, corpus):
    """With A = 1 and B = 0, W + B A moves as W would; the failing side has W move too."""
    changes = {"pipeline__stages": 2, "optim__name": "adamw", "optim__clip": 0.0,
               "optim__weight_decay": 0.0}  # fmt: skip
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    full = make_settings(**changes)
    lora = make_settings(
        **changes, lora__rank=full.model.dim, lora__alpha=full.model.dim, lora__targets=targets
    )
    weights = []
    for settings in (full, lora):
        chain = trained_chain(settings, corpus, 0)
        found = parameters(chain)
        with torch.no_grad():
            for name, parameter in found.items():
                if ".lora_A." in name:
                    parameter.copy_(torch.eye(*parameter.shape))
        if not frozen:
            for index, stage in enumerate(chain.stages):
                stage.requires_grad_(True)
                built = StageUpdate(chain.builder, stage, index)
                chain.updates[index].optimizer = built.optimizer
        chain.train_step(0)
        weights.append(found)
    plain, adapted = weights
    differences = [
        (plain[name] - adapted[name] - adapted[name.replace("weight", "lora_B.weight")])
        .abs().max().item()
        for name in plain
        if name.split(".")[-2] in targets
    ]  # fmt: skip
    assert len(differences) == 4 * 6
    if frozen:
        assert max(differences) < 1e-12
    else:
        assert min(differences) > 1e-9


@pytest.mark.parametrize("mode", ["subspace", "reparam"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_adapter_of_a_writer_stays_in_the_subspace(mode, optimizer, make_settings, corpus):
    settings = make_settings(**MODES[mode], optim__name=optimizer, **LORA)
    chain = trained_chain(settings, corpus, 0)
    before = chain.evaluate()
    for step in range(3):
        chain.train_step(step)
    ids = chain.feed.training(0, 0).inputs
    x = ids
    for layer in chain.stages[0].layers:
        x = layer(x)
    boundary = chain.stages[0].outgoing
    assert boundary is not None
    crossed = boundary.decode(boundary.encode(x, ids), ids)
    torch.testing.assert_close(crossed, x, rtol=0, atol=1e-12)
    assert chain.evaluate() < before
    if mode == "subspace":
        writers = [p for n, p in parameters(chain).items() if n.endswith("down_proj.lora_B.weight")]
        assert writers[0].shape == (settings.model.dim, 3) and bool(writers[0].any())
        assert chain.builder.constraint(chain.stages[0]).drift() < 1e-12


@pytest.mark.parametrize("merging", [True, False])
def test_merged_weights_compute_what_weights_and_adapters_do(merging, make_settings, corpus):
    """Of a projected model too, which does not fold; the failing side forgets the adapters."""
    settings = make_settings(**MODES["projected-narrow-table"], **LORA)
    chain = trained_chain(settings, corpus, 3)
    state = Snapshot(parameters(chain), settings, 3, Versions(3, 0))
    source = merged(state)
    assert not any(map(is_adapter, source.names())) and source.settings.lora.rank == 0
    plain = Joined(source.settings, CPU)
    for stage in plain.stages:
        restore_weights(stage, None, source if merging else state)
    ids = chain.feed.training(0, 0).inputs
    difference = (plain.logits(ids) - chain.logits(ids)).abs().max().item()
    assert difference < 1e-10 if merging else difference > 1e-4
