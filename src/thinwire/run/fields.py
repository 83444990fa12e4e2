"""Plain data of another process, checked against the annotations of a dataclass or TypedDict.

A check returns the value as it may be used, or raises ValueError with what it should have been.
Integers are counts, 0 or more. Text loses its control characters, for a terminal would obey them.
"""

import functools
import math
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from thinwire.errors import printable
from thinwire.typed import Exact, Finite

_LONGEST = 1 << 16  # characters of a text, entries of a list or a table
_LARGEST = 1 << 63
_Check = Callable[[Any], Any]


@functools.cache
def check_for(kind: Any) -> _Check:
    """The check that a type stands for."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if is_dataclass(kind) or is_typeddict(kind):
        return _record(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    inner = [check_for(argument) for argument in arguments if argument is not type(None)]
    if origin in (Union, types.UnionType):
        return lambda value: None if value is None else inner[0](value)
    return {list: _list, dict: _table, tuple: _tuple}[origin](inner)


@functools.cache
def checks_of(kind: Any) -> dict[str, _Check]:
    """The checks of all fields of a dataclass or TypedDict, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: check_for(hint) for name, hint in hints.items()}


def _record(kind: Any) -> _Check:
    checks = checks_of(kind)

    def check(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != checks.keys():
            raise ValueError(f"an object of {', '.join(checks)}")
        return kind(**{name: checked(value[name]) for name, checked in checks.items()})

    return check


def _list(inner: list[_Check]) -> _Check:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > _LONGEST:
            raise ValueError("a list")
        return [inner[0](entry) for entry in value]

    return check


def _table(inner: list[_Check]) -> _Check:
    key_check, value_check = inner

    def check(value: Any) -> dict[str, Any]:
        if len(_object(value)) > _LONGEST:
            raise ValueError("an object")
        return {key_check(key): value_check(entry) for key, entry in value.items()}

    return check


def _tuple(inner: list[_Check]) -> _Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(inner):
            raise ValueError(f"lists of {len(inner)} entries")
        return tuple(checked(entry) for checked, entry in zip(inner, value, strict=True))

    return check


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError("an integer, 0 or more")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return value if abs(value) < _LARGEST else float(value)


def _finite(value: Any) -> float:
    if not math.isfinite(_number(value)):
        raise ValueError("a finite number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _exact(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"text of at most {_LONGEST} characters")
    return value


def _text(value: Any) -> str:
    return printable(_exact(value))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("an object")
    return value


_SIMPLE: dict[Any, _Check] = {
    int: _count,
    float: _number,
    Finite: _finite,
    bool: _flag,
    str: _text,
    Exact: _exact,
    dict[str, Any]: _object,
}
