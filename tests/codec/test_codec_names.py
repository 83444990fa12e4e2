"""Codec names as users write them, and what docs/codecs.md says each of them sends."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinwire.codec import (
    Cast,
    Codec,
    Leg,
    Place,
    Surroundings,
    TensorSpec,
    build_codecs,
    cross,
    parse_codec,
    register_codec,
)
from thinwire.codec.parse import _CODECS
from thinwire.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "codecs.md"
CANONICAL = [
    "fp64", "fp32", "bf16", "int2", "int3", "int4", "int5", "int6", "int7", "int8",
    "int4(group=64)", "int8(group=4)", "int4(hadamard)", "int4(group=64,hadamard)", "int4(tensor)",
    "step(3)", "step(2.5)", "topk(0.1)", "topk(shared)", "randk(0.05)",
    "bf16+zstd", "int4+zstd(3)", "step(3)+zstd", "int4+ef", "topk(0.1)+ef-mixed", "topk(0.1)+ef21",
    "int4(group=64)+aqsgd", "topk(0.1)+ef21+zstd", "int4+zstd+ef", "randk(0.1)+ef-mixed+zstd(9)",
]  # fmt: skip


@pytest.mark.parametrize("name", CANONICAL)
def test_a_name_reads_back_to_the_same_codec(name):
    codec = parse_codec(name)
    assert codec.name == name
    again = parse_codec(codec.name)
    assert type(again) is type(codec) and again.tag == codec.tag and again is not codec


@pytest.mark.parametrize(
    ("written", "name"),
    [(" int4 ( hadamard , group = 64 ) + zstd ( 1 ) ", "int4(group=64,hadamard)+zstd"),
     ("int4(64)", "int4(group=64)"), ("int4()", "int4"), ("step(bits=3.0)", "step(3)"),
     ("topk(1e-3)", "topk(0.001)"), ("topk(.5)+ef", "topk(0.5)+ef"),
     ("randk( share=.1 )", "randk(0.1)")],
)  # fmt: skip
def test_what_means_the_same_prints_the_same(written, name):
    assert parse_codec(written).name == name


SLIPS = {"bf61": "bf16", "fp23": "fp32", "bfloat16": "bf16", "FP64": "fp64", "int44": "int4",
         "top-k(0.1)": "topk", "rank-k(2)": "randk"}  # fmt: skip
ALL = "fp64, fp32, bf16, int2, int3, int4, int5, int6, int7, int8, step, topk, randk"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("", "write a codec as in"), ("int4(", "write a codec as in"),
     ("+zstd", "write a codec as in"), ("int4+zst", '"zst" is not a suffix; did you mean "zstd"?'),
     ("zstd", '"zstd" must come after a codec, as in "bf16+zstd"'),
     ("int4+bf16", '"bf16" must come first'), ("bf16(3)", "bf16 takes no arguments"),
     ("step", "step takes bits=number"),
     ("step(13)", "step(13): bits must lie between 1.25 and 12"),
     ("int4(grup=64)", "int4 takes group=integer, tensor, hadamard, not (grup=64)"),
     ("int4(group=64,group=64)", '"group=64" is not a valid argument'),
     ("int4(group=)", '"group=" is not a valid argument'), ("int4(group=2)", "at least 4"),
     ("int4(group=48,hadamard)", "power of two"),
     ("int4(tensor,group=64)", "drop group and hadamard"), ("topk", "topk takes the share"),
     ("topk(0)", "above 0 and at most 1"),
     (f"int4(group={'9' * 5000})", 'int4 takes group=integer, tensor'),
     ("randk(1.5)", "above 0 and at most 1"), ("int4+zstd(23)", "between 1"),
     ("int4+zstd+ef+zstd", "compressing twice"),
     ("int4+zstd(fast)", "zstd takes level=integer, not (fast)"),
     ("int4+ef(3)", "ef takes no arguments"), ("int4+ef+ef21", "one kind of feedback"),
     ("int4+ef-mixed", "int4 has no share to halve; topk and randk"),
     ("zip", f'"zip" is not a codec; allowed: {ALL}'),
     *((wrong, f'is not a codec; did you mean "{meant}"?') for wrong, meant in SLIPS.items())],
)  # fmt: skip
def test_a_wrong_part_is_named_with_what_is_meant_or_allowed(wrong, said):
    with pytest.raises(ConfigError) as failure:
        parse_codec(wrong, "codec.backward")
    assert str(failure.value).startswith(f'codec.backward = "{wrong}": ')
    assert said in str(failure.value)


def test_a_shared_mask_without_a_mask_is_refused():
    with pytest.raises(ConfigError, match=r'^codec.backward = "topk\(shared\)": .*forward.*int4'):
        build_codecs("int4", "topk(shared)")
    with pytest.raises(ConfigError, match=r'^codec.forward = "topk\(shared\)\+ef": .*a backward'):
        build_codecs("topk(shared)+ef", "bf16")


class Rounded(Cast):
    """A codec with arguments, as an outsider might write it."""

    def __init__(self, digits: int, base: float = 10, exact: bool = False, note: str = ""):
        super().__init__("fp32")
        self.arguments = digits, base, exact, note


def test_a_registered_codec_is_read_by_its_signature(monkeypatch):
    monkeypatch.delitem(_CODECS, "rounded", raising=False)
    register_codec("rounded", Rounded)
    register_codec("rounded", Rounded)  # a module may be imported twice
    codec = parse_codec("rounded(3,base=2,exact,note=why)")
    assert isinstance(codec, Rounded) and codec.arguments == (3, 2.0, True, "why")
    assert type(codec.arguments[1]) is float
    assert parse_codec("rounded(3)+zstd").name == "fp32+zstd"
    for wrong in ("", "(2.5)", "(3,base=x)", "(3,note)", "(3,exact=1)", "(other=1)"):
        with pytest.raises(ConfigError, match="digits=integer, base=number, exact, note=word"):
            parse_codec(f"rounded{wrong}")
    with pytest.raises(ConfigError, match='did you mean "rounded"'):
        parse_codec("roundet(3)")


@pytest.mark.parametrize("name", ["bf16", "zstd", "int4", "Sign", "", "my codec", "a(b)", "a+b"])
def test_a_name_that_is_taken_or_unreadable_is_not_registered(name):
    with pytest.raises(ValueError, match="name"):
        register_codec(name, Rounded)
    assert _CODECS.get(name) is not Rounded


def test_a_place_has_a_key_of_its_own():
    """It decides everything random: another key and a run does not repeat."""
    place = Place(Leg.BACKWARD, step=3, microbatch=1, cut=2, seed=5)
    assert place.key == 554662618693138363
    assert replace(place, training=False, examples=(1, 2)).key == place.key
    steps, few, two = range(50), range(5), (0, 1)
    places = itertools.product(Leg, steps, few, few, two, two)
    keys = {Place(*where, salt=salt).key for *where, salt in places}
    assert len(keys) == 10_000 and all(0 <= key < 2**63 for key in keys)


# What docs/codecs.md says a token can see


def visible():
    table = DOCS.read_text().split("## What a token can see")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (`.*`) \|$", table, re.MULTILINE)
    return {decides: re.findall(r"`([^`]+)`", cell) for decides, cell in rows}


VISIBLE = visible()


def test_the_docs_say_of_every_codec_what_a_token_can_see():
    def words(names):
        return {name.rstrip("0123456789") for name in names if name != "rounded"}

    said = (name.partition("(")[0] for names in VISIBLE.values() for name in names)
    assert words(said) == words(_CODECS)


@pytest.mark.parametrize("suffix", ["", "+ef21", "+ef+zstd"])
@pytest.mark.parametrize(
    ("decides", "name"), [(d, n) for d, names in VISIBLE.items() for n in names]
)
def test_a_token_sees_in_evaluation_what_the_docs_say(decides, name, suffix):
    """Another last token of the first sequence: who else arrives otherwise?"""
    sent = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    other = sent.clone()
    other[0, -1] = 50 * sent[0, 0]
    place = Place(Leg.FORWARD, 3, 1, training=False)
    codec = parse_codec(name + suffix)
    whole = cross(codec, codec, sent, place)
    changed = whole != cross(codec, codec, other, place)
    assert bool(changed[0, :-1].any()) is (decides != "the token alone")
    assert bool(changed[1].any()) is (decides == "the microbatch")
    # Text is generated token by token where a codec says so.
    tokens = [cross(codec, codec, token, place) for token in sent.split(1, dim=1)]
    assert torch.equal(torch.cat(tokens, 1), whole) is codec.by_token


# What docs/codecs.md says about bytes, held against what codecs make.

TABLE = DOCS.read_text().split("## Payload")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `([^`]+)` \| (.*?`.*?`.*?) \|", TABLE, re.MULTILINE)
FORMULAS = {name: re.findall(r"`([^`]+)`", cell) for name, cell in ROWS}
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 64), (4, 5, 130), (2, 6, 5, 5), (3, 0), (0,)]


def said(formula, shape):
    """The value of a formula of the table, its letters as the page defines them."""
    N = math.prod(shape)
    D = shape[-1] if shape else 1
    B, n = (shape[0], N // shape[0]) if len(shape) > 1 else (1, N)

    def positions(B, n, k):
        marks = {low: k + (n - 1) // 2**low for low in range(1, 40)} | {0: n}
        low = min(range(40), key=lambda low: (marks[low] + k * low, low))
        return math.ceil(B * marks[low] / 8) + math.ceil(B * k * low / 8)

    def share(count, p):
        return min(count, max(1, round(p * count)))

    letters = {
        "N": N, "D": D, "R": N // D, "B": B, "n": n,
        "k": lambda p: share(n, p), "K": lambda p: share(N, p),
        "positions": positions, "ceil": math.ceil,
        "P": 2 * (N // D) + math.ceil(4 * N / 8),
    }  # fmt: skip
    value = eval(formula, {"__builtins__": {}}, letters)
    assert isinstance(value, int)
    return value


def payloads(name, shape):
    """The sizes that a codec really makes of a tensor: one, or two over two visits."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if name == "topk(shared)":
        codecs = build_codecs("topk(0.1)", name)
        codecs[Leg.FORWARD].pack(x, Place(Leg.FORWARD, 0, 0))
        return [len(bytes(codecs[Leg.BACKWARD].pack(x, Place(Leg.BACKWARD, 0, 0))))]
    codec: Codec = parse_codec(name)
    if not codec.remembers_examples:
        return [len(bytes(codec.pack(x, Place(leg, 0, 0)))) for leg in Leg]
    codec.prepare(TensorSpec(shape, x.dtype, x.device), Surroundings(9, 2**20))
    visits = [Place(Leg.FORWARD, step, 0, examples=tuple(range(shape[0]))) for step in (0, 1)]
    return [len(bytes(codec.pack(x, place))) for place in visits]


def test_the_table_has_every_codec():
    words = {re.match(r"[a-z0-9]+", name)[0] for name in FORMULAS}
    assert words >= {name for name in _CODECS if name != "rounded"}
    suffixes = {name.partition("+")[2] for name in FORMULAS}
    assert suffixes >= {"ef", "ef-mixed", "ef21", "aqsgd", "zstd"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_payloads_have_the_size_that_the_docs_say(name, shape):
    if "aqsgd" in name and not shape:
        return  # no rows to remember
    sizes, empty = payloads(name, shape), math.prod(shape) == 0
    wanted = [0 if empty else said(formula, shape) for formula in FORMULAS[name]]
    if "zstd" in name:
        (limit,) = wanted
        assert empty or parse_codec(name).payload_limit(shape) == limit
        assert max(sizes) <= parse_codec(name).payload_limit(shape)
    else:
        assert sizes == (wanted if "aqsgd" in name else wanted[:1] * len(sizes))
