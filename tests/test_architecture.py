"""The house stands: rooms import downward only, and nothing is unpickled.

The imports are read from the source, not from running modules, so that one inside a function
counts too.
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import thinwire

PACKAGE = "thinwire"
SOURCE = Path(thinwire.__file__).parent

FLOORS = [
    {"errors", "typed", "paths", "folders", "lazy", "arguments", "occupancy", "recipes"}
    | {"background", "safe_stream"},
    {"codec", "wire", "schedule", "data", "report"},
    {"model"},
    {"settings"},
    {"engine"},
    {"plan"},
    {"run"},
    {"train"},
    {"web"},
    {"inference", "hf", "cluster"},
    {"completion", "demo", "cli_host", "cli_model", "cli"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Rooms of one floor know nothing of each other, but for these.
NEIGHBOURS = {"arguments": {"errors"}, "typed": {"errors"}, "paths": {"errors"},
              "folders": {"errors"}, "lazy": {"errors"},
              "cli": {"completion", "demo", "cli_host", "cli_model"}}  # fmt: skip
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {"torch.load", "torch.save", "builtins.eval", "builtins.exec"}


@cache
def modules():
    """Every module of the package by dotted name, with its source."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        inner = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((PACKAGE, *inner))] = path.read_text(encoding="utf-8")
    return found


def imported(source):
    """Dotted names that a module imports; `from a import b` gives a.b, which may be a room."""
    for node in ast.walk(ast.parse(source) if isinstance(source, str) else source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from (f"{start}.{alias.name}" for alias in node.names)


class WithoutTypeChecking(ast.NodeTransformer):
    """Leaves out what only a type checker imports: it is never run."""

    def visit_If(self, node):
        return None if ast.unparse(node.test).endswith("TYPE_CHECKING") else node


def drawing(sources):
    """Which modules of the package each of its modules imports, at its top or in a function."""
    arrows: dict[str, set[str]] = {}
    for module, source in sources.items():
        tree = WithoutTypeChecking().visit(ast.parse(source))
        names = imported(tree)
        # `from a import b` imports a.b where that is a module, and else a.
        targets = {name if name in sources else name.rpartition(".")[0] for name in names}
        arrows[module] = (targets & sources.keys()) - {PACKAGE}
    return arrows


def circle(sources):
    """Modules that lead from one to the next and back to the first; none where there are none."""
    try:
        TopologicalSorter(drawing(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_of(name):
    """The room of a dotted name; None outside the package and for the package's own front."""
    parts = name.split(".")
    if parts[0] != PACKAGE or len(parts) < 2:
        return None
    if parts[1].startswith("__") and parts[1] != "__main__":
        return None
    return parts[1]


def objections(module, source):
    """What is wrong with the imports of one module."""
    found = []
    room = room_of(module)
    for name in imported(source):
        if name.startswith("."):
            found.append(f"{module} imports {name}: write the whole name")
            continue
        other = room_of(name)
        if other is None or other == room:
            continue
        if room is None:
            found.append(f"{module} imports {name}: the front of the package imports no room")
        elif other not in FLOOR:
            found.append(f"{module} imports {name}: {other} is on no floor")
        elif FLOOR[other] > FLOOR[room]:
            found.append(f"{module} imports {name}: {other} is above {room}")
        elif FLOOR[other] == FLOOR[room] and other not in NEIGHBOURS.get(room, set()):
            found.append(f"{module} imports {name}: {room} and {other} share a floor")
    return found


def dangers(source):
    """Ways in which a source could run what it was sent."""
    found = [name for name in imported(source) if name.split(".")[0] in UNSAFE_MODULES]
    found += [name for name in imported(source) if name in UNSAFE_ATTRIBUTES]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in UNSAFE_CALLS else []
        elif isinstance(node, ast.Attribute):
            found += [text] if (text := ast.unparse(node)) in UNSAFE_ATTRIBUTES else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            allowed = not (isinstance(node.value, ast.Constant) and node.value.value is False)
            found += ["allow_pickle"] if allowed else []
        elif isinstance(node, ast.List) and isinstance(next(iter(node.elts), None), ast.Attribute):
            # Without -P a file in the current folder would pass for a module.
            command = [ast.unparse(part) for part in node.elts[:2]]
            is_python, is_safe = command[0] == "sys.executable", command[1:] == ["'-P'"]
            found += ["python"] if is_python and not is_safe else []
    return found


def test_no_name_of_a_class_stands_for_two():
    trees = [ast.parse(source) for source in modules().values()]
    named = [
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in named if named.count(name) > 1} == set()


def test_every_room_is_on_a_floor():
    assert {"thinwire", "thinwire.codec.quantize", "thinwire.engine"} <= modules().keys()
    rooms = {room for name in modules() if (room := room_of(name))}
    assert rooms <= FLOOR.keys()
    assert sum(map(len, FLOORS)) == len(FLOOR), "a room is on one floor only"


def test_rooms_import_only_downward():
    found = [line for name, source in modules().items() for line in objections(name, source)]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [("thinwire.codec.quantize", "from thinwire import engine", "engine is above codec"),
     ("thinwire.wire.link", "from thinwire.codec import Codec", "wire and codec share a floor"),
     ("thinwire.run.coordinator", "def f():\n    import thinwire.cluster", "cluster is above run"),
     ("thinwire.data.order", "from .. import errors", "write the whole name"),
     ("thinwire.run.host", "import thinwire.attic", "attic is on no floor"),
     ("thinwire", "from thinwire.errors import WireError", "imports no room")],
)  # fmt: skip
def test_an_import_upward_or_sideways_is_refused(module, source, reason):
    (line,) = objections(module, source)
    assert line.startswith(f"{module} imports ") and line.endswith(reason)


def test_the_product_stands_without_the_lab_and_the_lab_on_what_is_public():
    users = {name for name, source in modules().items() if "thinwire_lab" in source}
    assert users == {"thinwire.cli"}, "the command finds the lab where it is installed"
    lab = SOURCE.parents[1] / "lab" / "src" / "thinwire_lab"
    names = [name for path in lab.rglob("*.py") for name in imported(path.read_text())]
    assert len(names) > 100
    assert [name for name in names if room_of(name) and "._" in name] == []


def test_no_module_leads_back_to_itself():
    assert circle(modules()) == []


@pytest.mark.parametrize(("first", "second", "found"), [
    ("import thinwire.b", "from thinwire import a", True),
    ("from thinwire.b import x", "def f(): import thinwire.a", True),
    ("import thinwire.b", "if TYPE_CHECKING:\n    import thinwire.a", False),
])  # fmt: skip
def test_circles_are_found(first, second, found):
    assert bool(circle({"thinwire": "", "thinwire.a": first, "thinwire.b": second})) == found


def test_nothing_that_arrives_is_ever_executed():
    found = {name: bad for name, source in modules().items() if (bad := dangers(source))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "import torch\nw = torch.load('x', weights_only=True)",
     "from torch import load", "y = eval('1 + 1')",
     "import numpy as np\nnp.load('x', allow_pickle=True)",
     "run([sys.executable, '-m', 'torch'])"],
)  # fmt: skip
def test_what_could_execute_is_found(source):
    assert dangers(source)
