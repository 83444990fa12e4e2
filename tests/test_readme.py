"""Our pages name what exists; their commands are in test_commands.py."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def anchors(page):
    """What a link can point at within a page: its headings, as a browser of code names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [
    README,
    *sorted((README.parent / "docs").glob("*.md")),
    *sorted((README.parent / "lab").glob("**/*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_map_of_the_code_names_what_exists():
    root = README.parent
    text = (root / "docs" / "architecture.md").read_text()
    names = re.findall(r"`([\w/]+\.py|\w+/)`", text)
    files = {path.name for path in (root / "src" / "thinwire").rglob("*")}
    missing = {n for n in names if n.rstrip("/").split("/")[-1] not in files}
    assert len(names) > 30 and not {name for name in missing if not (root / name).exists()}
