"""Imports that wait: optional packages, and the extras that bring them."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import thinwire
from thinwire.errors import MissingPackageError
from thinwire.lazy import needs

SOURCE = Path(thinwire.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def names(requirements):
    """The packages of requirements as they are imported, without extras and versions."""
    return {re.split(r"[\[<>=!~; ]", each)[0].replace("-", "_") for each in requirements}


def calls():
    """Every call of `needs` in the package: the file, the package and the extra."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "needs":
                given = [keyword.value for keyword in node.keywords if keyword.arg == "extra"]
                extra = given[0] if given else node.args[1]
                module = ast.literal_eval(node.args[0])
                found.append((path.name, module.partition(".")[0], ast.literal_eval(extra)))
    return found


def test_a_missing_package_names_the_extra(monkeypatch):
    with pytest.raises(MissingPackageError) as raised:
        needs("no_such_package.part", extra="hf", what="thinwire export")
    assert str(raised.value) == (
        "thinwire export needs no_such_package, which is not installed: pip install 'thinwire[hf]'"
    )
    monkeypatch.setitem(sys.modules, "json", None)  # how Python itself marks what is absent
    with pytest.raises(MissingPackageError, match=r"needs json, .* 'thinwire\[data\]'"):
        needs("json", extra="data", what="x")


@pytest.mark.parametrize("line", ["import no_such_part", "from json import no_such_name"])
def test_a_broken_package_is_not_called_missing(tmp_path, monkeypatch, line):
    (tmp_path / "a_broken_package.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingPackageError, match=r"cannot be imported \(.*no_such") as raised:
        needs("a_broken_package", extra="hf", what="x")
    assert str(raised.value).endswith("pip install --force-reinstall a_broken_package")


def test_every_extra_that_an_error_names_brings_the_package():
    extras = PROJECT["optional-dependencies"]
    found = calls()
    assert {("pyarrow", "data"), ("transformers", "hf")} <= {call[1:] for call in found}
    wrong = [call for call in found if call[1] not in names(extras.get(call[2], []))]
    assert wrong == []
