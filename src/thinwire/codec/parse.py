"""Codec names as users write them: `base`, `base(arguments)`, then suffixes behind a plus. What a
codec takes is read off its constructor, so a new codec needs a name here and nothing else.
"""

import inspect
import re
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from thinwire.codec.base import Codec, Leg
from thinwire.codec.quantize import FORMATS, Cast, Integer, StepCodec, TensorInteger
from thinwire.codec.sparse import RandK, SharedMask, TopK
from thinwire.codec.wrappers import AQSGD, EF21, ErrorFeedback, MixedErrorFeedback, Zstd
from thinwire.errors import ConfigError, GoneError
from thinwire.typed import nearest

Factory = Callable[..., Codec]

_NAME = re.compile(r"[a-z][a-z0-9-]*")
_TERM = re.compile(r"([^()+,=]+)(?:\(([^()]*)\))?")
_PLUS = re.compile(r"\+(?![^(]*\))")  # not within parentheses
_WORDS = {bool: "", int: "=integer", float: "=number", str: "=word"}
_NUMBER = re.compile(r"-?(\d{1,18}(\.\d*)?|\.\d+)(e-?\d+)?")


def _integer(
    bits: int, group: int | None = None, tensor: bool = False, hadamard: bool = False
) -> Codec:
    if not tensor:
        return Integer(bits, group, hadamard)
    if group is not None or hadamard:
        raise ConfigError(
            f"int{bits}(tensor) has one scale for the whole tensor: drop group and hadamard"
        )
    return TensorInteger(bits)


def _topk(share: float | None = None, shared: bool = False) -> Codec:
    if (share is None) is not shared:
        raise ConfigError(
            "topk takes the share of elements to send, such as topk(0.1); or, backward, "
            "topk(shared), the elements that were sent forward"
        )
    return SharedMask() if share is None else TopK(share)


_CODECS: dict[str, Factory] = {
    **{name: partial(Cast, name) for name in FORMATS},
    **{f"int{bits}": partial(_integer, bits) for bits in range(2, 9)},
    "step": StepCodec,
    "topk": _topk,
    "randk": RandK,
}
_SUFFIXES: dict[str, Factory] = {
    "zstd": Zstd,
    "ef": ErrorFeedback,
    "ef-mixed": MixedErrorFeedback,
    "ef21": EF21,
    "aqsgd": AQSGD,
}
GONE = ("fp16", "fp8", "lowrank")  # codecs of earlier releases


def register_codec(name: str, factory: Factory) -> None:
    """Let users write `name(arguments)` for the codec that `factory(arguments)` makes."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a codec: use lower-case letters, digits and - only")
    if name in _SUFFIXES or _CODECS.get(name, factory) is not factory:
        raise ValueError(f"{name!r} is already the name of another codec")
    _CODECS[name] = factory


def build_codecs(forward: str, backward: str, where: str = "codec") -> dict[Leg, Codec]:
    """The codecs of one end of a cut, new and without memory, for both directions."""
    there = parse_codec(forward, f"{where}.forward")
    back = parse_codec(backward, f"{where}.backward")
    if any(isinstance(codec, SharedMask) for _, codec in there.walk()):
        raise ConfigError(
            f'{where}.forward = "{forward}": topk(shared) is a backward codec: it reuses the '
            "elements that the forward codec chose"
        )
    for codec in (codec for _, codec in back.walk() if isinstance(codec, SharedMask)):
        try:
            codec.bind(there)
        except ConfigError as error:
            raise ConfigError(f'{where}.backward = "{backward}": {error}') from None
    return {Leg.FORWARD: there, Leg.BACKWARD: back}


def parse_codec(name: str, where: str = "codec") -> Codec:
    """The codec a name stands for; `where` is the config key, for the message."""
    text = "".join(name.split())
    try:
        (base, arguments), *suffixes = _terms(text)
        codec = _made(_CODECS, base, arguments)
        for suffix, arguments in suffixes:
            codec = _made(_SUFFIXES, suffix, arguments, codec)
    except ConfigError as error:
        error.args = (f'{where} = "{name}": {error}',)  # of its own class: GoneError makes a text
        raise
    return codec


def _terms(text: str) -> list[tuple[str, str]]:
    """The names between the pluses, each with what stands in its parentheses."""
    parts = _PLUS.split(text)
    found = [term for part in parts if (term := _TERM.fullmatch(part))]
    if len(found) < len(parts):
        raise ConfigError('write a codec as in "int4(group=64)" or "topk(0.1)+ef21+zstd"')
    return [(term[1], term[2] or "") for term in found]


def _made(factories: dict[str, Factory], name: str, arguments: str, *inner: Codec) -> Codec:
    """What a factory makes of the arguments, once these fit its signature."""
    if name not in factories:
        if name in GONE:
            raise GoneError(f"the codec {name}")
        is_base = factories is _CODECS
        if name in (_SUFFIXES if is_base else _CODECS):
            hint = f"bf16+{name}" if is_base else f"{name}+zstd"
            place = "after a codec" if is_base else "first"
            raise ConfigError(f'"{name}" must come {place}, as in "{hint}"')
        kind = "a codec" if is_base else "a suffix"
        raise ConfigError(f'"{name}" is not {kind}{nearest(name, factories)}')
    factory = factories[name]
    signature = inspect.signature(factory, eval_str=True)
    taken = list(signature.parameters.values())[len(inner) :]
    by_place, by_name = _read(arguments)
    try:
        bound = signature.bind(*inner, *by_place, **by_name)
        for parameter in taken:
            if parameter.name in bound.arguments and parameter.annotation is not parameter.empty:
                value = bound.arguments[parameter.name]
                bound.arguments[parameter.name] = msgspec.convert(value, parameter.annotation)
    except (TypeError, msgspec.ValidationError):
        usage = ", ".join(map(_usage, taken)) or "no arguments"
        instead = f", not ({arguments})" if arguments else ""
        raise ConfigError(f"{name} takes {usage}{instead}") from None
    return factory(*bound.args, **bound.kwargs)


def _read(arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by place and by name; a bare word is a name with the value True."""
    by_place: list[Any] = []
    by_name: dict[str, Any] = {}
    for argument in arguments.split(",") if arguments else []:
        key, equals, value = argument.partition("=")
        if not equals and _NUMBER.fullmatch(key):
            by_place.append(_value(key))
        elif not key.isidentifier() or key in by_name or (equals and not value):
            raise ConfigError(f'"{argument}" is not a valid argument')
        else:
            by_name[key] = _value(value) if equals else True
    return by_place, by_name


def _value(text: str) -> int | float | str:
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _usage(parameter: inspect.Parameter) -> str:
    kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
    return parameter.name + next((word for kind, word in _WORDS.items() if kind in kinds), "")
