"""A stage: which of its layers write into the subspace, and what runs again."""

import pytest
import torch

from thinwire import model
from thinwire.model import llama

CONFIG = model.ModelConfig(layers=4, dim=32, heads=4, kv_heads=2, ffn=48, vocab=50, context=8)
CONFIG = CONFIG.resolved()


def test_two_stages_of_a_process_do_not_compute_their_first_cosines_at_once(monkeypatch):
    """In one of some thousand processes a table was off by 1e-4, and its weights were others."""
    held = []
    ask = lambda angle: held.append(llama._COSINES.locked()) or angle  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "cos", ask)
    model.Stage(model.architecture(CONFIG).stage_layers(range(2)))
    assert held == [True, True]


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


def test_with_recompute_a_block_runs_again_in_the_backward():
    ids_BT = torch.randint(CONFIG.vocab, (3, 8))
    for recompute, times in ((False, 1), (True, 2)):
        stage = model.Stage(model.architecture(CONFIG).layers(), recompute=recompute)
        stage.initialise(CONFIG, seed=1)
        calls = []
        stage.layers[1].mlp.register_forward_pre_hook(lambda *given, seen=calls: seen.append(given))
        model.token_loss(stage(ids_BT), ids_BT).backward()
        assert len(calls) == times
