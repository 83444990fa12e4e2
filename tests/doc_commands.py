"""Finds the commands in our pages, and how each block of them is to be tested.

A mark before a block of commands says how:

    <!-- commands: run -->              as they stand
    <!-- commands: short -->            as they stand, but `thinwire train` with a few small steps
    <!-- commands: plan: reason -->     `thinwire train` as `thinwire plan`, the rest is checked
    <!-- commands: check: reason -->    not run: programs, options and settings must exist

A block without a mark is an error, and so is a mark without a block.
"""

import re
import shlex
from dataclasses import dataclass

WAYS = ("run", "short", "plan", "check")
SHELLS = ("bash", "sh", "shell", "console")
_PROGRAM = re.compile(
    r"\s*(\$ )?([A-Z_]+=\S|"
    r"(thinwire|torchrun|make|python3?|pip|touch|source|git|curl|docker|sudo)\b)"
)
_MARK = re.compile(r"\s*<!-- commands: *(\w+)(?:: *(.+?))? *-->")


@dataclass(frozen=True)
class Block:
    """Lines of commands in a page, and how they are tested."""

    page: str
    line: int
    way: str
    text: str

    def commands(self):
        """Each command as the variables set before it and its words."""
        found = []
        defined: dict[str, str] = {}  # by lines that do nothing else
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command, words = words[:end], words[end + 1 :]
                variables = {}
                while command and (matched := re.match(r"([A-Z_]+)=(.*)", command[0], re.DOTALL)):
                    variables[matched[1]] = matched[2]
                    command.pop(0)
                if command:
                    found.append(
                        (variables, [w for word in command for w in _put_in(word, defined)])
                    )
                else:
                    defined.update(variables)
        return found


def find_blocks(page, text):
    """The blocks of commands of a page; ValueError names one without a mark, and a lost mark."""
    found = []
    mark: tuple[int, str] | None = None
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        if matched := _MARK.match(line):
            _check_mark(f"{page}:{number + 1}", matched[1], matched[2])
            mark = (number + 1, matched[1])
        elif line.lstrip().startswith("```") or (
            line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        ):
            start = number
            is_fenced = line.lstrip().startswith("```")
            number = _end(lines, start, is_fenced)
            inner = lines[start + 1 : number] if is_fenced else lines[start : number + 1]
            language = line.strip().strip("`")
            may_be_commands = not language or not is_fenced
            if language in SHELLS or (may_be_commands and _is_command(inner)):
                if mark is None:
                    raise ValueError(
                        f"{page}:{start + 1}: commands without a mark, {inner[0].strip()!r}: put "
                        "<!-- commands: run --> or another way before them (tests/doc_commands.py)"
                    )
                found.append(Block(page, start + 1, mark[1], "\n".join(inner)))
                mark = None
        elif line.strip() and mark is not None:
            raise ValueError(f"{page}:{mark[0]}: no commands follow this mark")
        number += 1
    if mark is not None:
        raise ValueError(f"{page}:{mark[0]}: no commands follow this mark")
    return found


def pages(root):
    """The pages whose commands are tested."""
    folders = (root / "docs", root / "lab", root / "lab" / "results")
    below = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    return [root / "README.md", root / "CONTRIBUTING.md", *below]


def _check_mark(place, way, reason):
    if way not in WAYS:
        raise ValueError(f"{place}: unknown way {way!r}; known: {', '.join(WAYS)}")
    if way in ("plan", "check") and not reason:
        raise ValueError(f"{place}: say why these are not run: <!-- commands: {way}: reason -->")


def _end(lines, start, is_fenced):
    """The number of the line that closes a fence, or of the last that is indented."""
    number = start + 1
    if is_fenced:
        while number < len(lines) and not lines[number].lstrip().startswith("```"):
            number += 1
        return number
    while number < len(lines) and lines[number].startswith("    "):
        number += 1
    return number - 1


def _put_in(word, defined):
    """A `$NAME` as the words that it stands for, as a shell would."""
    return shlex.split(defined[word[1:]]) if word[1:] in defined and word[0] == "$" else [word]


def _is_command(lines):
    return bool(lines) and _PROGRAM.match(lines[0]) is not None
