"""A stage: the same weights and the same numbers however the layers are split."""

import itertools

import pytest
import torch

from thinwire import model

CONFIG = model.ModelConfig(layers=4, dim=32, heads=4, kv_heads=2, ffn=48, vocab=50, context=8)
CONFIG = CONFIG.resolved()
SPLITS = [[4], [2, 2], [1, 3], [3, 1], [1, 2, 1], [1, 1, 1, 1]]
splits = pytest.mark.parametrize("split", SPLITS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def whole_model(dtype=torch.float32, recompute=False):
    stage = model.Stage(model.architecture(CONFIG).layers(), recompute=recompute)
    stage.initialise(CONFIG, seed=1)
    return stage.to(dtype)


def stages_of(split, dtype=torch.float32):
    starts = [0, *itertools.accumulate(split)]
    stages = []
    for start, stop in itertools.pairwise(starts):
        stage = model.Stage(
            model.architecture(CONFIG).stage_layers(range(start, stop)),
            incoming=model.DenseBoundary() if start > 0 else None,
            outgoing=model.DenseBoundary() if stop < CONFIG.layers else None,
        )
        stage.initialise(CONFIG, seed=1)
        stages.append(stage.to(dtype))
    return stages


def batch():
    ids = torch.randint(CONFIG.vocab, (3, 9), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


def gradients(stage):
    found = {}
    for name, parameter in stage.global_parameters().items():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@dtypes
@splits
def test_stages_in_a_row_are_the_whole_model_bit_for_bit(split, dtype):
    ids_BT, targets_BT = batch()
    whole = whole_model(dtype)
    logits = whole(ids_BT)
    model.token_loss(logits, targets_BT).backward()

    stages = stages_of(split, dtype)
    received, sent = [ids_BT], []
    for stage in stages:
        sent.append(stage(received[-1]))
        received.append(sent[-1].detach().requires_grad_())
    assert torch.equal(sent[-1], logits)

    model.token_loss(sent[-1], targets_BT).backward()
    for index in reversed(range(len(stages) - 1)):
        z = received[index + 1]
        assert z is not None and z.grad is not None
        sent[index].backward(z.grad)
    merged = {name: grad for stage in stages for name, grad in gradients(stage).items()}
    assert same_bits(merged, gradients(whole))


@pytest.mark.parametrize(
    ("blocks", "reparam", "held", "first_free"),
    [(0, False, range(4), "model.layers.0"), (3, False, range(2, 4), "model.layers.3"),
     (4, True, range(2, 4), "model.norm"), (2, True, range(2, 4), "model.layers.2")],
)  # fmt: skip
def test_the_stream_is_free_behind_the_last_layer_that_writes_into_the_subspace(
    blocks, reparam, held, first_free
):
    basis_DK = model.random_basis(CONFIG.dim, 4, seed=0)
    space = model.Space(basis_DK, torch.zeros(CONFIG.vocab, CONFIG.dim))
    narrow = model.Narrow(space, blocks, reparam)
    stage = model.Stage(model.architecture(CONFIG).stage_layers(held, narrow))
    assert stage.first_free_layer() == first_free
    inside = [index for index in held if index < blocks]
    writers = {f"model.layers.{i}.{name}" for i in inside for name in
               ("self_attn.o_proj.weight", "mlp.down_proj.weight")}  # fmt: skip
    table = {"model.embed_tokens.weight"} if held.start == 0 else set()
    axes = {entry.name: entry.axis for entry in stage.held_parameters()}
    assert axes.keys() == (set() if reparam else writers | table)
    assert stage.reparametrised().keys() == (writers | table if reparam else set())
    assert all(axis == (1 if "embed" in name else 0) for name, axis in axes.items())


@dtypes
def test_recompute_gives_the_same_gradients(dtype):
    ids_BT, targets_BT = batch()
    calls = []
    results = []
    for recompute in (False, True):
        stage = whole_model(dtype, recompute)
        count = [0]

        def note(*_, count=count):
            count[0] += 1

        stage.layers[1].mlp.register_forward_pre_hook(note)
        model.token_loss(stage(ids_BT), targets_BT).backward()
        results.append(gradients(stage))
        calls.append(count[0])
    assert calls == [1, 2], "with recompute a block runs again in the backward"
    assert same_bits(*results)
