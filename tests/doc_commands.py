"""Finds the commands in our pages, and how each block of them is to be tested.

Commands are indented. A mark before a block of them says how:

    <!-- commands: run -->              as they stand
    <!-- commands: short -->            as they stand, but `thinwire train` with a few small steps
    <!-- commands: plan: reason -->     `thinwire train` as `thinwire plan`, the rest is checked
    <!-- commands: check: reason -->    not run: programs, options and settings must exist

A block without a mark is an error, and so is a mark without a block. Python in fences has no mark:
what it imports must exist, and take the arguments that it gives.
"""

import re
import shlex
from dataclasses import dataclass, replace

WAYS = ("run", "short", "plan", "check")
_PROGRAM = re.compile(
    r" *(```.*\n)?\s*(\$ )?([A-Z_]+=\S|"
    r"(thinwire|torchrun|make|python3?|pip|touch|source|git|curl|docker|sudo)\b)"
)
_SHELL = re.compile(r" *```(bash|sh|shell|console)\b")
_MARK = re.compile(r" *<!-- commands: *(\w+)(?:: *(.+?))? *-->")
_PARAGRAPH = re.compile(r"^ *<!--.*-->|(?:^(?! *<!--).*\S.*\n?)+", re.MULTILINE)
find_python = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL).findall  # in a page


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
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command, words = words[:end], words[end + 1 :]
                variables = {}
                while matched := re.match(r"([A-Z_]+)=(.*)", command[0], re.DOTALL):
                    variables[matched[1]] = matched[2]
                    command.pop(0)
                found.append((variables, command))
        return found


def find_blocks(page, text):
    """The blocks of commands of a page; ValueError names one without a mark, and a lost mark."""
    found, way, goes_on = [], "", False
    for paragraph in [*_PARAGRAPH.finditer(text), None]:
        part = paragraph[0] if paragraph else ""
        place = f"{page}:{1 + text.count(chr(10), 0, paragraph.start() if paragraph else None)}"
        is_code = part.startswith(("    ", "```")) and _PROGRAM.match(part)
        if way and not is_code:
            raise ValueError(f"{place}: no commands follow the mark before this")
        if matched := _MARK.fullmatch(part):
            way, reason = matched.groups()
            if way not in WAYS:
                raise ValueError(f"{place}: unknown way {way!r}; known: {', '.join(WAYS)}")
            if way in ("plan", "check") and not reason:
                raise ValueError(f"{place}: say why: <!-- commands: {way}: reason -->")
        elif is_code and goes_on and not way:
            found[-1] = replace(found[-1], text=f"{found[-1].text}\n{part}")
        elif is_code or _SHELL.match(part):
            if not way or "```" in part:
                what = "fences around commands" if "```" in part else "commands without a mark"
                raise ValueError(f"{place}: {what}: indent them, behind <!-- commands: run -->")
            found.append(Block(page, int(place.partition(":")[2]), way, part))
            way = ""
        goes_on = is_code
    return found


def pages(root):
    """The pages whose commands are tested."""
    folders = (root / "docs", root / "lab", root / "lab" / "results")
    below = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    return [root / "README.md", root / "CONTRIBUTING.md", *below]
