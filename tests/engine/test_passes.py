"""Microbatches replayed as CUDA graphs: the same bits as without.

Where there is no CUDA device, graphs of our own take the place of those of torch.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from settings_values import narrow
from thinwire.engine import worker
from thinwire.engine.build import StageBuilder
from thinwire.engine.passes import GraphPasses, autocast_for, weights_rounded_once
from thinwire.errors import ConfigError
from whole_state import are_equal

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
BF16 = {"run__precision": "bf16", "run__device": DEVICE, "codec__forward": "int8",
        "codec__backward": "int4", "train__batch": 8, "pipeline__microbatches": 8}  # fmt: skip
OWN_TABLES = narrow("projected", anchor="per-stage", bound=4.0)


class RecordedGraph(TorchDispatchMode):
    """What a CUDA graph does: the same kernels, from and into the same memory. A capture computes
    nothing: what lies outside is as before, what is its own holds rubbish.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.own, self.outside = [], {}, {}

    def __torch_dispatch__(self, kernel, types, arguments=(), options=None):
        options = options or {}
        for value, of in zip(arguments, kernel._schema.arguments, strict=False):
            if of.alias_info is not None and of.alias_info.is_write:
                for one in tree_leaves(value):
                    if isinstance(one, torch.Tensor) and storage(one) not in self.own:
                        self.outside.setdefault(storage(one), (one, one.detach().clone()))
        result = kernel(*arguments, **options)
        read = {storage(one) for one in tensors((arguments, options))}
        fresh = [one if storage(one) not in read else None for one in tensors(result)]
        self.own |= {storage(one): one for one in fresh if one is not None}
        self.kernels.append((kernel, arguments, options, fresh))
        return result

    def capture_begin(self, pool=None, capture_error_mode=""):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        with torch.no_grad():
            for one, before in self.outside.values():
                one.copy_(before)
            for one in self.own.values():
                one.data.fill_(3)

    def pool(self):
        return None

    @torch.no_grad()
    def replay(self):
        for kernel, arguments, options, fresh in self.kernels:
            for one, again in zip(fresh, tensors(kernel(*arguments, **options)), strict=True):
                if one is not None:
                    one.copy_(again)


def storage(tensor):
    return tensor.untyped_storage()._cdata


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@pytest.fixture
def trained(make_settings, run_in_threads, monkeypatch):
    """Trains with or without graphs: those of torch, or where it has none our own."""

    def train(graphs, changes, **how):
        settings = make_settings(**{**BF16, "train__steps": 4, **changes}, run__graphs=graphs)
        with monkeypatch.context() as patch:
            if graphs and not HAS_CUDA:
                patch.setattr(worker, "Passes", GraphPasses)
            return run_in_threads(settings, **how)

    return train


@pytest.fixture(autouse=True)
def graphs_of_our_own(monkeypatch):
    if not HAS_CUDA:
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, stand_in in {
            "CUDAGraph": RecordedGraph, "Stream": lambda device: stream,
            "current_stream": lambda device: stream, "stream": contextlib.nullcontext,
            "empty_cache": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in)


def weights(outcome):
    return {name: weight.cpu() for name, weight in outcome.weights().items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"boundary__mode": "dense", "pipeline__stages": 1},
        {**OWN_TABLES, "pipeline__stages": 3, "pipeline__window": 4},
        {**OWN_TABLES, "pipeline__stages": 3, "pipeline__schedule": "gpipe"},
        {**OWN_TABLES, "pipeline__stages": 2, "pipeline__delay": 2},
        pytest.param(
            {"boundary__mode": "dense", "pipeline__stages": 1, "run__compile": True},
            marks=pytest.mark.skipif(not HAS_CUDA, reason="compiles for a CUDA device"),
        ),
        {**OWN_TABLES, "pipeline__stages": 2, "lora__rank": 2},
        {**narrow("subspace", anchor="embedding"), "pipeline__stages": 3},
        {**narrow("subspace", anchor="fixed"), "pipeline__stages": 3, "run__precision": "fp64"},
    ],
    ids=["alone", "window", "gpipe", "delay", "compiled", "adapters", "embedding", "fp64"],
)
def test_graphs_train_the_same_weights(changes, trained):
    plain, replayed = (trained(graphs, changes) for graphs in (False, True))
    assert replayed.losses() == plain.losses()
    assert replayed.valid_losses() == plain.valid_losses()
    assert are_equal(weights(plain), weights(replayed))


def test_targets_that_are_not_learned(trained, masked):
    plain, replayed = (trained(graphs, {}, data=masked) for graphs in (False, True))
    assert are_equal(weights(plain), weights(replayed))


def test_weights_that_are_not_rounded_again(trained, monkeypatch):
    """The failing side: graphs that read what was rounded before they were captured."""
    right = weights(trained(True, {}))
    monkeypatch.setattr(GraphPasses, "forget_rounded", lambda self: None)
    assert not are_equal(right, weights(trained(True, {})))


def test_what_is_sent_stays_as_it_was(make_settings):
    """A link may pack it when the graphs compute the next microbatch already."""
    settings = make_settings(**BF16, **OWN_TABLES, pipeline__stages=3)
    device = torch.device(DEVICE, 0)
    builder = StageBuilder(settings, device)
    stage = builder.build(1)
    builder.initialise(stage)
    passes = GraphPasses(stage, autocast_for("bf16", device))
    shape = settings.microbatch_size, settings.model.context
    batch = SimpleNamespace(inputs=torch.zeros(shape, dtype=torch.long, device=device),
                            loss_of=lambda stage, microbatches: (None, microbatches))  # fmt: skip
    with weights_rounded_once():
        sent = []
        for scale in (1.0, 2.0):
            received = torch.full(builder.wire_spec.shape, scale, device=device)
            passed = passes.forward(received, batch, 1)
            back = passed.backward(torch.full_like(passed.output, scale))
            sent.append((passed.output, passed.output.clone(), back, back.clone()))
    (output, was, back, back_was), (_, output_2, _, _) = sent
    assert torch.equal(output, was) and torch.equal(back, back_was)
    assert not torch.equal(was, output_2)


def test_on_other_devices_there_are_none(make_settings, run_in_threads):
    plain, asked = (run_in_threads(make_settings(run__graphs=graphs)) for graphs in (False, True))
    assert are_equal(plain.weights(), asked.weights())


@pytest.mark.parametrize(
    "changes", [{"pipeline__recompute": True}, narrow("subspace", basis_update_every=2)]
)
def test_what_cannot_be_captured_is_refused(changes, make_settings):
    with pytest.raises(ConfigError, match=r"run.graphs = true cannot work with"):
        make_settings(**changes, run__graphs=True)
