"""The lm-eval harness: what is refused before it is asked. It is no dependency of these tests."""

import sys

import pytest

from thinwire.cli import main


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["eval", *arguments])
    assert end.value.code not in (0, 1)
    return capsys.readouterr().err


def test_options_that_contradict_each_other_are_refused(capsys):
    assert "needs the name of a task" in refused(capsys, "x", "--lm-eval", " , ")
    assert "leave out --data" in refused(capsys, "x", "--lm-eval", "piqa", "--data", "y")
    assert "leave out --data" in refused(capsys, "x", "--lm-eval", "piqa", "--batches", "3")
    assert "--limit and --tasks-folder" in refused(capsys, "x", "--limit", "3")
    assert "--limit and --tasks-folder" in refused(capsys, "x", "--tasks-folder", "y")


def test_without_the_harness_the_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused(capsys, str(tmp_path), "--lm-eval", "piqa")
    assert "--lm-eval needs lm_eval" in said and "thinwire[eval]" in said
