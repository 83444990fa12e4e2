"""The messages that two ends may say to each other, by their names on the wire.

Messages are frozen dataclasses, and no message is used before every field is checked: an end that
has proven its key may still send nonsense. A wrong or missing field is the sender's error, a
WireError that names it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from thinwire.errors import WireError, printable
from thinwire.run.compact import as_text, deflate, inflate, parsed
from thinwire.run.fields import checked, hints_of

MAX_MESSAGE = 16 << 20
"""The largest message of any stream to a coordinator: also one of token ids."""
MOST_SAID = 1 << 20
"""Bytes of the largest control message, before it is deflated and after it is inflated."""

Reshape = Callable[[dict[str, Any]], dict[str, Any]]


class Vocabulary:
    """Kinds of messages with their names. `small` has those that travel in another form, with the
    functions there and back; the latter raises ValueError for what the former cannot have made.
    `most` bounds the bytes of a kind further.
    """

    def __init__(
        self,
        kinds: Mapping[str, type],
        small: Mapping[str, tuple[Reshape, Reshape]] | None = None,
        most: Callable[[str], int] = lambda name: MOST_SAID,
    ):
        self._kinds = dict(kinds)
        self._most = most
        self._names = {kind: name for name, kind in kinds.items()}
        self._small = small or {}

    def extended(self, kinds: Mapping[str, type]) -> "Vocabulary":
        """These kinds of messages and some more, which may have the most bytes of all."""

        def most(name: str) -> int:
            return MOST_SAID if name in kinds else self._most(name)

        return Vocabulary({**self._kinds, **kinds}, self._small, most)

    def name_of(self, message: Any) -> str:
        """What a message, or a kind of message, is called on the wire."""
        return self._names[message if isinstance(message, type) else type(message)]

    def pack(self, message: Any) -> bytes:
        """A message as it travels; a malformed one is a WireError, which shows at its sender.

        What has the default of its field is left out.
        """
        name = self.name_of(message)
        plain = asdict(self._checked(name, asdict(message)))
        for key, default in _defaults(type(message)).items():
            if plain[key] == default:
                del plain[key]
        if name in self._small:
            plain = self._small[name][0](plain)
        text = as_text({"type": name, **plain})
        self._check_size(name, len(text))
        return deflate(text)

    def unpack(self, payload: bytes) -> Any:
        """The message of a payload, every field checked; WireError names what is wrong with it."""
        try:
            text = inflate(payload, MOST_SAID)
            message = parsed(text)
        except ValueError as error:
            reason = printable(str(error), 200)
            raise WireError(f"a control message cannot be read: {reason}") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise WireError("a control message must be an object with a type")
        name = message.pop("type")
        self._check_size(name, len(text))
        if name in self._small:
            try:
                message = self._small[name][1](message)
            except ValueError as error:
                raise WireError(f"a {name!r} message has {error}") from None
        return self._checked(name, message)

    def _check_size(self, name: str, size: int) -> None:
        if size > (most := self._most(name)):
            raise WireError(
                f"a control message of type {_quoted(name)} has {size} bytes, at most {most} are "
                "allowed"
            )

    def _checked(self, name: str, values: dict[str, Any]) -> Any:
        kind: Any = self._kinds.get(name)
        if kind is None:
            raise WireError(f"a control message of unknown type: {_quoted(name)}")
        wanted = hints_of(kind)
        for key in values.keys() - wanted.keys():
            raise WireError(f"a {name!r} message has an unknown field: {_quoted(key)}")
        fields, defaults = {}, _defaults(kind)
        for key, hint in wanted.items():
            if key not in values:
                if key in defaults:
                    continue
                raise WireError(f"a {name!r} message has no field {key!r}")
            try:
                fields[key] = checked(hint, values[key])
            except (ValueError, OverflowError) as error:
                raise WireError(
                    f"a {name!r} message has {key} = {_quoted(values[key])}, which must be {error}"
                ) from None
        return kind(**fields)


def _defaults(kind: Any) -> dict[str, Any]:
    """The fields of a message that may be left out, with what they then are."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _quoted(value: Any) -> str:
    return printable(repr(value), 100)
