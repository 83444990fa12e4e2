"""The lm-eval harness, which is no dependency of these tests, is asked for where it is missing."""

import sys


def test_without_the_harness_the_extra_is_named(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, said = command("eval", tmp_path, "--lm-eval", "piqa")
    assert code not in (0, 1)
    assert "--lm-eval needs lm_eval" in said and "thinwire[eval]" in said
