"""The commands of the README run as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def commands() -> list[str]:
    text = README.read_text()
    block = re.search(r"run by tests/test_readme.py -->\n```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return block.group(1).strip().splitlines()


@pytest.mark.timeout(600)
def test_readme_commands_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environment = {**os.environ, "THINWIRE_CACHE": str(tmp_path_factory.mktemp("readme-cache"))}
    lines = commands()
    assert len(lines) >= 6
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "thinwire"
        finished = subprocess.run(
            [sys.executable, "-m", "thinwire.cli", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert finished.returncode == 0, f"{line}\n{finished.stdout}{finished.stderr}"
    assert (tmp_path / "runs/first/checkpoints/step-00000024/manifest.json").is_file()


def anchors(page: Path) -> set[str]:
    """What a link can point at within a page: its headings, as a browser of code names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [README, *sorted((README.parent / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_names_what_exists() -> None:
    """The tour names real files."""
    root = README.parent
    text = README.read_text()
    tour = text.split("src/thinwire/\n", 1)[1].split("```", 1)[0]
    for line in tour.splitlines():
        names = re.findall(r"^ +((?:[\w/]+\.py|\w+/)(?: [\w/]+\.py)*)", line)
        for name in names[0].split() if names else []:
            assert list((root / "src/thinwire").rglob(name.rstrip("/"))), name
