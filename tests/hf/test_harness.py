"""The lm-eval harness, which is no dependency of these tests, is asked for where it is missing."""

import sys

import pytest

from thinwire.cli import main


def test_without_the_harness_the_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as end:
        main(["eval", str(tmp_path), "--lm-eval", "piqa"])
    assert end.value.code not in (0, 1)
    said = capsys.readouterr().err
    assert "--lm-eval needs lm_eval" in said and "thinwire[eval]" in said
