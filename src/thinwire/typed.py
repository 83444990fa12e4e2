"""Strict conversion between plain data (TOML, JSON) and config dataclasses: an unknown key or a
wrong type is refused everywhere alike. msgspec decides whether a value has its type; what is said
about it, and what a setting allows, is here.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from operator import ge, gt, le, lt
from typing import Any, TypeVar

import msgspec

from thinwire.errors import ConfigError

T = TypeVar("T")
Scope = typing.Literal["result", "keeping", "machine"]
"""Whose affair a setting is: it decides the result, so that every peer must have the same; it says
how a run is named, watched, kept and hurried; or it is each machine's own."""
_HOLDS = {"at least": ge, "above": gt, "at most": le, "below": lt}
_LIMIT = 2**63  # what TOML can hold, and what torch counts with
_MANY = 10**9  # the most of what is counted, unless another bound is given

Finite = typing.Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]  # neither NaN nor infinite
Exact = typing.Annotated[str, "exact"]  # used, not shown, as a path: no character is dropped
_TYPES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list[int]: "a list of integers",
    list[str]: "a list of strings",
}


def nearest(word: str, candidates: typing.Iterable[str]) -> str:
    """A suggestion such as `; did you mean "dim"?`, or the list of what is allowed."""
    names = list(candidates)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else f"; allowed: {', '.join(names)}"


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    *,
    least: float | None = 0,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    auto: float | None = None,
    scope: Scope = "result",
) -> Any:
    """A config field with its default, its explanation, and its allowed values. A number must be at
    least 0, and one that counts at most `_MANY`, unless other bounds are given; `auto`, or a
    default below 0, stands for our choice.
    """
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    least = least if above is None else None
    if isinstance(default, int) and least is not None and most is None:
        most = _MANY
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    metadata = {
        "help": help,
        "choices": choices,
        "bounds": {w: bound for w, bound in bounds.items() if is_number and bound is not None},
        "auto": default if is_number and default < 0 else auto,
        "scope": scope,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def from_plain(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build `cls`, and what is in it, from a mapping; `where` is its dotted place, for messages."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'config'} must be a table of keys, got {_brief(values)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        place = f"{where}.{key}" if where else key
        if key not in fields:
            kind = "key" if where else "section"
            raise ConfigError(f'unknown {kind} "{place}"{nearest(key, fields)}')
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = from_plain(typing.cast(type, hints[key]), value, place)
            continue
        checked = _converted(value, hints[key], place)
        choices = fields[key].metadata.get("choices", ())
        if choices and checked not in choices:
            raise ConfigError(f"{place} = {value!r} is not allowed{nearest(str(value), choices)}")
        _check_bounds(checked, fields[key].metadata, place)
        arguments[key] = checked
    return cls(**arguments)


def to_toml(config: Any, resolved: Any | None = None) -> str:
    """A config as TOML: each key with what it means, and its value in `resolved` if it differs."""
    lines = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        meant = getattr(resolved, section.name) if resolved is not None else values
        entries = []
        for entry in dataclasses.fields(values):
            choices = entry.metadata.get("choices", ())
            note = entry.metadata["help"]
            if choices and not all(choice in note for choice in choices):
                note += f" ({', '.join(choices)})"
            value, result = getattr(values, entry.name), getattr(meant, entry.name)
            if result != value:
                note = f"here {_literal(result)}: {note}"
            entries.append((f"{entry.name} = {_literal(value)}", note))
        width = max(len(text) for text, _ in entries)
        written = [f"{text:<{width}}  # {note}" for text, note in entries]
        lines += [f"[{section.name}]", *written, ""]
    return "\n".join(lines)


def parse_literal(text: str, cls: type, key: str, place: str) -> Any:
    """Read the text of `--set section.key=value` as the type that the field has."""
    hints = typing.get_type_hints(cls)
    if key not in hints:
        raise ConfigError(f'unknown key "{place}"{nearest(key, hints)}')
    wanted = hints[key]
    plain = text.replace("_", "") if wanted is int else text  # 1_000, as TOML has it
    try:
        value = _entries(text) if typing.get_origin(wanted) is list else plain
        return msgspec.convert(value, wanted, strict=False)
    except (ValueError, RecursionError):  # of tomllib, or of msgspec
        kind = _TYPES.get(wanted, wanted)
        raise ConfigError(f"{place}: cannot read {_brief(text)} as {kind}") from None


def _entries(text: str) -> list[Any]:
    """Those of a list as TOML has them, or bare between commas, but not within parentheses."""
    if text.startswith("["):
        return list(tomllib.loads(f"entries = {text}")["entries"])
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def learn_types(*kinds: Any) -> None:
    """Let msgspec learn types where they are defined: two threads that do it at once crash it."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)


def _converted(value: Any, wanted: Any, place: str) -> Any:
    """The value in its type, which numbers fit that a machine can count with."""
    try:
        found = msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        if entry := re.search(r"\$\[(\d+)\]", str(error)):
            value, place = value[int(entry[1])], f"{place}[{entry[1]}]"
            wanted = typing.get_args(wanted)[0]
        kind = _TYPES.get(wanted, wanted)
        raise ConfigError(f"{place} must be {kind}, got {_brief(value)}") from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{place} = {found} must be a finite number")
    for number in found if isinstance(found, list) else [found]:
        if isinstance(number, int) and not -_LIMIT <= number < _LIMIT:
            raise ConfigError(f"{place} = {_brief(number)} must fit into 64 bits")
    return found


def _check_bounds(value: Any, metadata: Mapping[str, Any], place: str) -> None:
    """Refuse a value outside its bounds, with all of them and what the setting means."""
    bounds, auto = metadata.get("bounds", {}), metadata.get("auto")
    if value == auto or all(_HOLDS[words](value, bound) for words, bound in bounds.items()):
        return
    allowed = " and ".join(f"{words} {bound:,}" for words, bound in bounds.items())
    other = "" if auto is None else f", or {auto:g}"
    raise ConfigError(f"{place} = {_brief(value)} must be {allowed}{other} ({metadata['help']})")


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:40]}... ({len(text):,} characters)"


def _literal(value: Any) -> str:
    """A value as TOML has it, which is as in JSON, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
