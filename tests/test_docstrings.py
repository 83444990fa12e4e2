"""Every public method says what it is for, or overrides one that does."""

import importlib
import inspect
import pkgutil
from types import FunctionType

import thinwire


def methods():
    """The public methods and properties that the package defines, by dotted name."""
    for info in pkgutil.walk_packages(thinwire.__path__, "thinwire."):
        if info.name.endswith("__main__"):
            continue  # it would run
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == info.name:
                for name, value in vars(kind).items():
                    is_method = inspect.isroutine(value) or isinstance(value, property)
                    dotted = f"{info.name}.{kind.__qualname__}.{name}"
                    if is_method and "._" not in dotted and not is_lambda(value):
                        yield dotted, getattr(kind, name)


def is_lambda(value):
    """A field whose default is a function is no method."""
    return isinstance(value, FunctionType) and value.__name__ == "<lambda>"


def test_methods_have_a_docstring_or_inherit_one():
    found = dict(methods())
    assert len(found) > 300
    assert [name for name, method in found.items() if not inspect.getdoc(method)] == []
