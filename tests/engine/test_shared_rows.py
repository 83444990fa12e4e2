"""The embedding that all stages have a copy of: every row is updated when it is due, on all alike.

`boundary.anchor = "embedding"`; what becomes of a row is RowAdamW's, which has its own tests.
"""

import hashlib
import math

import pytest
import torch
from engine_runs import CPU, built, furthest, total
from plain import learning_rate, moments_of, order_of, update_by_hand

from settings_values import EXACT, narrow
from thinwire.codec import Leg
from thinwire.engine import shared
from thinwire.engine.build import StageBuilder
from thinwire.engine.checkpoint import Snapshot
from thinwire.engine.conversion import Folded
from thinwire.engine.shared import SharedRows
from thinwire.model import fixed_table, token_loss
from thinwire.settings import Settings
from thinwire.settings.crossing import row_bytes
from trained import trained_chain

SHARED = {**narrow("subspace", anchor="embedding", row_tokens=20, row_steps=5), "train__steps": 7,
          "pipeline__stages": 4, "codec__rows": "fp64"}  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
START = "1a4db81442d5ec89"  # the first bytes of the hash of what seed 0 draws


@pytest.fixture
def settings_for(make_settings):
    return lambda **changes: make_settings(**(SHARED | changes))


def copies(stages):
    return [stage.embedding_copy().detach() for stage in stages]


def plain_training(settings, corpus):
    """One plain model: the writers below the last cut stay in S, and rows wait by hand."""
    torch.set_num_threads(1)
    boundary, optim, steps = settings.boundary, settings.optim, settings.train.steps
    builder, stages = built(settings)
    held = {h.name: 0 for stage in stages for h in stage.held_parameters()}
    _, (model,) = built(settings_of_one_stage(settings))
    with torch.no_grad():  # which all machines draw alike
        model.embedding_copy().copy_(
            fixed_table(*model.embedding_copy().shape, settings.run.seed, settings.model.embed_std)
        )
    parameters, basis_DK = model.global_parameters(), builder.space.basis_DK
    inside_DD = basis_DK @ basis_DK.T
    with torch.no_grad():
        for name in held:
            parameters[name].copy_(inside_DD @ parameters[name])
    moments = moments_of(parameters)
    embedding = parameters.pop(EMBEDDING)
    waiting, seen, last = torch.zeros_like(embedding), [0] * len(embedding), [0] * len(embedding)
    order = order_of(settings, corpus)
    losses = []
    for step in range(steps):
        total = 0.0
        for m in range(settings.pipeline.microbatches):
            batch = order.microbatch(step, m)
            loss = token_loss(model(torch.from_numpy(batch.inputs_BT)),
                              torch.from_numpy(batch.targets_BT))  # fmt: skip
            (loss / settings.pipeline.microbatches).backward()
            total += loss.item() / settings.pipeline.microbatches
            for token in batch.inputs_BT.flatten().tolist():
                seen[token] += 1
        losses.append(total)
        lr = learning_rate(settings, step)
        with torch.no_grad():
            for name in held:
                parameters[name].grad = inside_DD @ parameters[name].grad
            update_by_hand(parameters, moments, held, settings, step)
            waiting += embedding.grad
            embedding.grad = None
            for row in range(len(embedding)):
                has_turn = (row + step + 1) % boundary.row_steps == 0
                if seen[row] < boundary.row_tokens and not (has_turn and seen[row]):
                    continue
                (mean, square), g = (moment[row] for moment in moments[EMBEDDING]), waiting[row]
                passed = step + 1 - last[row]
                mean.mul_(0.9**passed).add_(0.1 * g)
                square.mul_(0.95**passed).add_(0.05 * g**2)
                scale = (square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
                as_long = sum((0.9 / 0.95**0.5) ** k for k in range(passed))
                embedding[row] *= (1 - lr * optim.weight_decay) ** passed
                embedding[row] -= lr * as_long * mean / (1 - 0.9 ** (step + 1)) / scale
                waiting[row], seen[row], last[row] = 0.0, 0, step + 1
    return losses, parameters | {EMBEDDING: embedding}


def settings_of_one_stage(settings):
    """The plain dense model of the same shape."""
    plain = settings.to_plain()
    plain["pipeline"] |= {"stages": 1, "split": []}
    plain["boundary"] = {"mode": "dense"}
    return Settings.from_plain(plain)


@pytest.fixture(params=[1, 7, 10**6], ids=lambda rows: f"{rows} rows in a frame")
def frames(request, monkeypatch):
    """Rows travel in frames of so many: one by one, in several, all together."""
    bytes_of_a_row = 8 * 32  # float64
    monkeypatch.setattr(shared, "ROW_FRAME_BYTES", request.param * bytes_of_a_row)


@pytest.mark.usefixtures("frames")
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_pipeline_trains_what_a_plain_model_with_waiting_rows_trains(
    stages, settings_for, run_in_threads, corpus
):
    """Losses and every weight in float64, the embedding among them, on every stage."""
    settings = settings_for(pipeline__stages=4)
    losses, weights = plain_training(settings, corpus)
    outcome = run_in_threads(settings_for(pipeline__stages=stages, boundary__free_layers=1))
    assert outcome.losses() == pytest.approx(losses, abs=1e-10)
    assert furthest(outcome.weights(), weights) < 1e-9
    for copy in copies([worker.stage for worker in outcome.workers]):
        assert (copy - weights[EMBEDDING]).abs().max().item() < 1e-9


def test_copies_stay_equal_to_the_bit_and_the_chain_trains_the_same_with_as_many_bytes(
    settings_for, run_in_threads, corpus
):
    lossy = {"codec__forward": "int8", "codec__backward": "int4", "codec__rows": "int4"}
    settings = settings_for(**EXACT | lossy)
    outcome = run_in_threads(settings)
    chain = trained_chain(settings, corpus, 0)
    losses = [chain.train_step(step) for step in range(settings.train.steps)]
    assert outcome.losses() == losses
    first, *others = copies([worker.stage for worker in outcome.workers])
    for copy in (*others, *copies(chain.stages)):
        assert torch.equal(copy, first)
    assert not torch.equal(built(settings)[1][0].embedding_copy(), first)
    up = sum(total(outcome.steps(cut)[-1].meters[f"cut-{cut}"], "ROWS") for cut in range(3))
    down = sum(total(outcome.steps(cut + 1)[-1].meters[f"cut-{cut}"], "ROWS") for cut in range(3))
    assert up == down > 0
    assert chain.row_bytes == {Leg.FORWARD: up, Leg.BACKWARD: down}
    assert up / 3 <= settings.train.steps * row_bytes(settings), "no more than planned"


@pytest.mark.parametrize("mode", ["subspace", "reparam"])
@pytest.mark.parametrize("equal", [True, False])
def test_at_every_step_it_is_a_plain_model_as_long_as_copies_are_equal(
    mode, equal, settings_for, corpus, monkeypatch
):
    """Folded after three steps, rows still waiting; where a stage misses the changes, it is not."""
    if not equal:
        followed = SharedRows.follow
        monkeypatch.setattr(
            SharedRows, "follow", lambda own, *told: own.index == 2 or followed(own, *told)
        )
    settings = settings_for(boundary__mode=mode)
    chain = trained_chain(settings, corpus, 3)
    weights = {n: p for stage in chain.stages for n, p in stage.owned_parameters().items()}
    folded = Folded(Snapshot(weights, settings, 3, chain.updates[0].versions))
    plain = StageBuilder(settings_of_one_stage(settings), CPU).build(0)
    with torch.no_grad():
        for name, parameter in plain.global_parameters().items():
            parameter.copy_(folded.tensors([name])[name])
        ids_BT = chain.feed.training(0, 0).inputs
        apart = (chain.logits(ids_BT) - plain(ids_BT)).abs().max()
    assert (apart < 1e-12) == equal


def test_a_resumed_run_goes_on_with_all_that_waits(settings_for, saved_run, resumed, monkeypatch):
    """The failing side: without the gradients that waited it is another one."""
    settings = settings_for(train__checkpoint_every=1, boundary__free_layers=1)
    whole, saved = saved_run(settings)
    assert resumed(settings, saved[3]).losses() == pytest.approx(whole.losses()[3:], abs=1e-10)
    monkeypatch.setattr(SharedRows, "load", lambda own, source: None)
    forgetful = resumed(settings, saved[3]).losses()
    assert forgetful[-1] != pytest.approx(whole.losses()[-1], abs=1e-10)


def test_a_refused_step_changes_nothing(settings_for, corpus):
    settings = settings_for()
    chain = trained_chain(settings, corpus, 2)

    def state():
        found = [update.rows.state_tensors() for update in chain.updates]
        found += [stage.global_parameters() for stage in chain.stages]
        return [tensor.detach().clone() for tensors in found for tensor in tensors.values()]

    before, forward = state(), chain.stages[2].forward
    chain.stages[2].forward = lambda *given: forward(*given) * math.nan
    chain.train_step(2)
    chain.stages[2].forward = forward
    for then, now in zip(before, state(), strict=True):
        assert torch.equal(then, now)
    chain.train_step(3)
    assert not all(map(torch.equal, before, state()))


def test_gradients_that_are_not_finite_never_wait(settings_for, corpus):
    """Also of a row that is not due: it would refuse all steps once it is."""
    settings = settings_for(boundary__row_tokens=10**6, boundary__row_steps=10**6)
    chain = trained_chain(settings, corpus, 1)
    before = [update.rows.state_tensors() for update in chain.updates]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in before]
    copy_VD = chain.stages[2].embedding_copy()
    spoilt = torch.tensor([7])
    hook = copy_VD.register_hook(lambda grad: grad.index_fill(0, spoilt, math.inf))
    chain.train_step(1)
    assert [update.version for update in chain.updates] == [1] * 4
    for update, state in zip(chain.updates, before, strict=True):
        for name, tensor in update.rows.state_tensors().items():
            assert torch.equal(tensor, state[name])
    hook.remove()
    chain.train_step(2)
    assert [update.version for update in chain.updates] == [2] * 4


def test_the_start_of_the_embedding_is_the_same_on_every_machine(settings_for):
    """Machines of different kinds draw their own copies: torch's normal numbers would differ."""
    for stage in built(settings_for(**EXACT, codec__rows="fp32", model__embed_std=0.3))[1]:
        table_VD = stage.embedding_copy().detach()
        assert hashlib.sha256(table_VD.numpy().tobytes()).hexdigest()[:16] == START
        assert table_VD.std().item() == pytest.approx(0.3, rel=0.05)
