"""What an examination found: what was looked at, what will go wrong, and the fix."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["blocks", "note", "fine"]
_ORDER: tuple[Level, ...] = ("blocks", "note", "fine")
_WIDTH = 96


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    `what` says what was found, with the values of this machine; `trouble` what will go wrong, and
    `fix` what to do about it. Both are empty where all is fine.
    """

    level: Level
    what: str
    trouble: str = ""
    fix: str = ""


def fine(what: str) -> Finding:
    """Nothing to do."""
    return Finding("fine", what)


def note(what: str, trouble: str, fix: str) -> Finding:
    """The machine can take part, but worse than it could."""
    return Finding("note", what, trouble, fix)


def blocks(what: str, trouble: str, fix: str) -> Finding:
    """The machine cannot take part like this."""
    return Finding("blocks", what, trouble, fix)


class Findings:
    """All findings, the worst first, each with a number."""

    def __init__(self, found: Iterable[Finding]) -> None:
        self._found = sorted(found, key=lambda finding: _ORDER.index(finding.level))

    @property
    def is_blocked(self) -> bool:
        """Whether something keeps this machine from taking part."""
        return any(finding.level == "blocks" for finding in self._found)

    def at(self, level: Level) -> list[Finding]:
        """The findings of one level."""
        return [finding for finding in self._found if finding.level == level]

    def to_plain(self) -> dict[str, Any]:
        """For programs."""
        findings = [
            {"number": number, **vars(finding)} for number, finding in enumerate(self._found, 1)
        ]
        return {"blocked": self.is_blocked, "findings": findings}

    def text(self) -> str:
        """For people: what to do first."""
        lines = []
        for number, finding in enumerate(self._found, 1):
            mark = {"blocks": "BLOCKS: ", "note": "note: ", "fine": "fine: "}[finding.level]
            lines += _wrapped(f"{number:>2}. ", f"{mark}{finding.what}")
            if finding.trouble:
                lines += _wrapped("    ", finding.trouble)
            if finding.fix:
                lines += _wrapped("    fix: ", finding.fix)
        count, notes = len(self.at("blocks")), len(self.at("note"))
        if count:
            verdict = f"{count} of these {'keeps' if count == 1 else 'keep'} this machine out."
        elif notes:
            verdict = "Nothing keeps this machine out; the notes say what could be better."
        else:
            verdict = "Nothing keeps this machine out."
        return "\n".join([*lines, "", verdict])


def _wrapped(start: str, text: str) -> list[str]:
    # Commands in a fix are to be copied: no word is broken.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
