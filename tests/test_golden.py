"""The golden runs' recorder: it sees equal runs as equal, and names what differs."""

import copy
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("golden", ROOT / "tools" / "golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_run_recorded_twice_is_equal_and_a_changed_one_is_not(golden, capsys):
    first, second = (golden.record(ROOT / "src", "gpipe") for _ in range(2))
    assert golden.compare(first, second) == 0, capsys.readouterr().out
    changed = copy.deepcopy(second)
    (name,) = changed
    changed[name]["losses"][-1] += 1e-9
    changed[name]["tensors"]["lm_head.weight"] = "other"
    changed[name]["bytes"][0][0] += 1
    assert golden.compare(first, changed) == 1
    shown = capsys.readouterr().out
    assert "losses (" in shown and "1 of " in shown and "(lm_head.weight)" in shown
    assert "bytes per token (" in shown and shown.endswith("1 of 1 runs differ\n")
