"""What holds for every codec, whatever it is: shapes, sizes, views, refusals, memory."""

import pytest
import torch
from tensors import normal, sent

from thinwire.codec import Leg, Place, Surroundings, TensorSpec, parse_codec, spec_of
from thinwire.errors import WireError
from whole_state import are_equal

NAMES = [
    "fp64", "fp32", "bf16", "int2", "int4", "int8", "int4(group=4,hadamard)", "int4(tensor)",
    "step(3)", "topk(0.2)", "randk(0.2)", "step(3)+zstd", "int4+ef", "topk(0.2)+ef",
    "topk(0.2)+ef-mixed", "randk(0.2)+ef-mixed", "bf16+ef21", "topk(0.2)+ef21", "int4+zstd+ef21",
    "topk(0.2)+aqsgd", "int4+aqsgd",
]  # fmt: skip
REMEMBERING = [name for name in NAMES if parse_codec(name).remembers]
SHAPES = [(), (1,), (0, 4), (3, 5), (1, 1, 1), (3, 4, 6)]


def made(name, tensor):
    codec = parse_codec(name)
    codec.prepare(spec_of(tensor), Surroundings(3, 10**6))
    return codec


def at(number, tensor, training=True):
    examples = tuple(range(tensor.shape[0])) if tensor.ndim else None
    return Place(Leg.FORWARD, number, 0, training=training, examples=examples)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_any_shape_arrives_in_the_type_that_is_expected(name, shape):
    if not shape and "aqsgd" in name:
        return  # which needs a row for each example
    tensor = normal(shape, 0)
    sender, receiver = made(name, tensor), made(name, tensor)
    for number in range(3):
        place, spec = at(number, tensor), TensorSpec(shape, torch.float64, tensor.device)
        payload = sender.pack(normal(shape, number), place)
        assert len(payload) <= sender.payload_limit(shape)
        assert sender.size_varies or len(payload) == sender.payload_limit(shape)
        got = receiver.unpack(payload, spec, place)
        assert got.shape == shape and got.dtype == torch.float64 and bool(got.isfinite().all())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_view_is_read_in_row_order_and_left_alone(name, single):
    """A single element counts as contiguous, though its neighbours in memory are not its own."""
    view = torch.ones(4, 6)[::4, ::6] if single else normal((6, 4, 3), 0).transpose(0, 2)
    view.requires_grad_()
    before = view.detach().clone()
    plain = torch.ones(1, 1) if single else before.contiguous()
    one, other = made(name, plain), made(name, plain)
    for number in range(2):
        place = at(number, plain)
        assert bytes(one.pack(view, place)) == bytes(other.pack(plain, place))
    assert torch.equal(view, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_size_is_refused_and_every_kind_of_bytes_is_read(name):
    tensor = normal((3, 4, 6), 0)
    sender, place = made(name, tensor), at(0, tensor)
    payload = bytes(sender.pack(tensor, place))
    receiver = made(name, tensor)
    before = receiver.agreement()
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(WireError):
            receiver.unpack(wrong, spec_of(tensor), place)
    assert receiver.agreement() == before, "and remembers nothing of it"
    receiver.unpack(payload, spec_of(tensor), place)
    assert receiver.agreement() == sender.agreement()
    got, owned = [], bytearray(payload)
    for same in (payload, owned, memoryview(payload)):
        got.append(made(name, tensor).unpack(same, spec_of(tensor), place))
    owned[:] = bytes(len(owned))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_never_arrives_as_finite(name, bad):
    tensor = normal((3, 4, 6), 0)
    sender, receiver = made(name, tensor), made(name, tensor)
    sent(sender, receiver, tensor, at(0, tensor))
    before = sender.agreement()
    spoilt = tensor.clone()
    spoilt[1, 2, 3] = bad
    assert not bool(sent(sender, receiver, spoilt, at(1, tensor)).isfinite().all())
    assert sender.agreement() == receiver.agreement() == before, "and leaves no trace"


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_saved_state_continues_alike_and_evaluation_leaves_no_trace(name, done):
    tensor = normal((3, 4, 6), 0)
    ends, resumed = ([made(name, tensor) for _ in range(2)] for _ in range(2))
    for number in range(done):
        sent(*ends, normal((3, 4, 6), number), at(number, tensor))
    for old, new in zip(ends, resumed, strict=True):
        new.load_state_tensors({n: state.clone() for n, state in old.state_tensors().items()})
    sent(*ends, normal((3, 4, 6), 99), at(99, tensor, training=False))
    for number in range(done, done + 3):
        next_one, place = normal((3, 4, 6), number), at(number, tensor)
        assert torch.equal(sent(*ends, next_one, place), sent(*resumed, next_one, place))
        assert ends[0].agreement() == resumed[0].agreement() == resumed[1].agreement()
    agreed = ends[0].agreement()
    ends[0].pack(normal((3, 4, 6), 100), at(100, tensor))  # which the other end misses
    assert (ends[0].agreement() != agreed == ends[1].agreement()) or not agreed
    sent(resumed[0], resumed[1], normal((3, 4, 6), 100), at(100, tensor))
    assert are_equal(ends[0].state_tensors(), resumed[0].state_tensors())
