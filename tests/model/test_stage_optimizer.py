"""Which parameter is updated by what, and state that outlives the grouping it was made in."""

import hashlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from thinwire.model import OptimConfig, Role, StageOptimizer
from whole_state import are_equal

SHAPES = {"model.embed_tokens.weight": (12, 8), "model.layers.0.input_layernorm.weight": (8,),
          "model.layers.0.self_attn.q_proj.weight": (8, 8),
          "model.layers.0.mlp.up_proj.weight": (10, 8),
          "model.layers.1.input_layernorm.weight": (8,),
          "model.layers.1.self_attn.q_proj.weight": (8, 8),
          "model.layers.1.mlp.down_proj.weight": (8, 10), "model.norm.weight": (8,),
          "lm_head.weight": (12, 8)}  # fmt: skip
NAMES = list(SHAPES)
GAINS = {name for name, shape in SHAPES.items() if len(shape) == 1}
BLOCK_MATRICES = {name for name in SHAPES if name.startswith("model.layers.") and name not in GAINS}
ROLES = {
    "model.embed_tokens.weight": Role.TABLE,
    **dict.fromkeys(BLOCK_MATRICES, Role.MATRIX),
    "lm_head.weight": Role.HEAD,
}
# Groupings of the same parameters: one stage, two, two cut elsewhere, one for each parameter.
GROUPINGS = {"whole": [NAMES], "halves": [NAMES[:4], NAMES[4:]], "uneven": [NAMES[:1], NAMES[1:]],
             "singles": [[name] for name in NAMES]}  # fmt: skip
EQUAL = {"matrix_lr": 1.0, "table_lr": 1.0, "head_lr": 1.0}
optimizers = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def noise(what, shape, dtype):
    """Normal numbers that depend on the text alone."""
    seed = int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fresh(dtype=torch.float32):
    return {name: nn.Parameter(noise(name, shape, dtype)) for name, shape in SHAPES.items()}


class Ensemble:
    """All parameters, under one StageOptimizer for each group of names."""

    def __init__(self, grouping, config, dtype=torch.float32):
        self.parameters = fresh(dtype)
        self.parts = [
            StageOptimizer({name: self.parameters[name] for name in group}, ROLES, config)
            for group in GROUPINGS[grouping]
        ]

    def train(self, steps):
        for step in steps:
            for name, parameter in self.parameters.items():
                what = f"gradient of {name} at {step}"
                parameter.grad = noise(what, SHAPES[name], parameter.dtype)
            for part in self.parts:
                part.step(0.01 * (step + 1))

    def state(self):
        """A copy of the weights and the optimizer state, as a checkpoint makes one."""
        merged: dict[str, Tensor] = {}
        for part in self.parts:
            found = part.state_tensors()
            assert not merged.keys() & found.keys()
            merged.update(found)
        return {name: value.clone() for name, value in merged.items()}

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def load(self, weights, state):
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        for part in self.parts:
            part.load_state_tensors({name: value.clone() for name, value in state.items()})


@optimizers
@pytest.mark.parametrize("after", GROUPINGS)
@pytest.mark.parametrize("before", GROUPINGS)
def test_state_moves_between_groupings_bit_for_bit(optimizer, before, after):
    config = OptimConfig(name=optimizer)
    uninterrupted = Ensemble("whole", config)
    uninterrupted.train(range(6))
    first, second = Ensemble(before, config), Ensemble(after, config)
    first.train(range(3))
    second.load(first.weights(), first.state())
    assert are_equal(second.state(), first.state())
    second.train(range(3, 6))
    assert are_equal(second.weights(), uninterrupted.weights())
    assert are_equal(second.state(), uninterrupted.state())


def test_muon_is_for_the_matrices_of_blocks_only():
    muon = Ensemble("whole", OptimConfig(name="muon", **EQUAL))
    muon.train(range(2))
    by_muon = {n.split("/")[0] for n in muon.state() if n.endswith("/momentum_buffer")}
    by_adamw = {n.split("/")[0] for n in muon.state() if n.endswith("/exp_avg")}
    assert by_muon == BLOCK_MATRICES
    assert by_adamw == SHAPES.keys() - BLOCK_MATRICES
    adamw = Ensemble("whole", OptimConfig(name="adamw"))
    adamw.train(range(2))
    for name in NAMES:
        equal = torch.equal(adamw.parameters[name], muon.parameters[name])
        assert equal == (name not in BLOCK_MATRICES), name


def test_adamw_is_the_textbook_update():
    config = OptimConfig(weight_decay=0.1)
    ensemble = Ensemble("halves", config, torch.float64)
    expected = ensemble.weights()
    first, second = ({n: torch.zeros_like(w) for n, w in expected.items()} for _ in range(2))
    for step in range(4):
        lr = 0.01 * (step + 1)
        for name, weight in expected.items():
            gradient = noise(f"gradient of {name} at {step}", SHAPES[name], torch.float64)
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            mean = first[name] / (1 - 0.9 ** (step + 1))
            scale = (second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
            decay = 0.0 if name in GAINS else config.weight_decay
            expected[name] = weight - lr * decay * weight - lr * mean / scale
    ensemble.train(range(4))
    for name, weight in ensemble.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-13)


@optimizers
def test_rates_are_shares_of_one(optimizer):
    """Each kind of parameter moves at its own share of the rate; a share of one changes nothing."""
    shares = {"matrix_lr": 2.0, "table_lr": 3.0, "head_lr": 5.0}
    moved = {}
    for chosen in (EQUAL, shares):
        config = OptimConfig(name=optimizer, weight_decay=0.0, **chosen)
        ensemble = Ensemble("halves", config, torch.float64)
        before = ensemble.weights()
        ensemble.train(range(1))
        moved[chosen is shares] = {n: w - before[n] for n, w in ensemble.weights().items()}
    expected = {"model.embed_tokens.weight": 3.0, "lm_head.weight": 5.0}
    if optimizer == "muon":
        expected |= dict.fromkeys(BLOCK_MATRICES, 2.0)
    for name in NAMES:
        wanted = moved[False][name] * expected.get(name, 1.0)
        torch.testing.assert_close(moved[True][name], wanted, rtol=1e-9, atol=1e-12)


TRAINS = """
import sys, torch
from thinwire.engine.build import prepare_torch
from thinwire.model import OptimConfig, Role, StageOptimizer
from thinwire.settings import Settings

prepare_torch(Settings(), torch.device("cpu"))
matrix, gain = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,)))
named = {"matrix": matrix, "gain": gain}
optimizer = StageOptimizer(named, {"matrix": Role.MATRIX}, OptimConfig(name="muon"))
(matrix @ gain).sum().backward()
optimizer.step(0.1)
assert torch.are_deterministic_algorithms_enabled() and (gain < 1).all()
assert not torch.is_deterministic_algorithms_warn_only_enabled()
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
torch.optim.AdamW([gain])
assert "torch._dynamo" in sys.modules, "torch's own may be used again"
"""


def test_a_stage_trains_without_the_compiler():
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
