"""Plain data of another process, checked against the annotations of a dataclass or TypedDict.

Integers are counts, 0 or more. Text loses its control characters, for a terminal would obey them.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

from thinwire.errors import printable
from thinwire.typed import Exact, Finite

_LONGEST = 1 << 16  # characters of a text, entries of a list or a table
_LARGEST = 1 << 63


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


_SIMPLE: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: type(value) is int and 0 <= value < _LARGEST, "an integer, 0 or more"),
    float: (_is_number, "a number"),
    Finite: (lambda value: _is_number(value) and math.isfinite(value), "a finite number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (_is_text, f"text of at most {_LONGEST} characters"),
    Exact: (_is_text, f"text of at most {_LONGEST} characters"),
    dict[str, Any]: (lambda value: isinstance(value, dict), "an object"),
}
hints_of = functools.cache(functools.partial(get_type_hints, include_extras=True))
"""The annotations of a dataclass or TypedDict."""


def checked(kind: Any, value: Any) -> Any:
    """`value` as it may be used; ValueError, with what it should have been, if it may not."""
    if kind in _SIMPLE:
        is_right, what = _SIMPLE[kind]
        _demand(is_right(value), what)
        return printable(value) if kind is str else value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else checked(inner[0], value)
    if origin is tuple:
        right = isinstance(value, list | tuple) and len(value) == len(inner)
        _demand(right, f"lists of {len(inner)} entries")
        return tuple(checked(one, entry) for one, entry in zip(inner, value, strict=True))
    if origin is list:
        _demand(isinstance(value, list) and len(value) <= _LONGEST, "a list")
        return [checked(inner[0], entry) for entry in value]
    if origin is dict:
        _demand(isinstance(value, dict) and len(value) <= _LONGEST, "an object")
        return {checked(inner[0], k): checked(inner[1], entry) for k, entry in value.items()}
    hints = hints_of(kind)
    right = isinstance(value, dict) and value.keys() == hints.keys()
    _demand(right, f"an object of {', '.join(hints)}")
    return kind(**{name: checked(hint, value[name]) for name, hint in hints.items()})


def _demand(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)
