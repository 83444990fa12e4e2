"""The bench of deaths: what it kills ends with the weights of an undisturbed run."""

import random

from thinwire_lab.deaths import LARGE, kill_stages, settings_of


def test_a_stage_dies_and_the_run_ends_as_if_it_had_not(tmp_path):
    row = kill_stages(tmp_path, 1, random.Random(0))
    assert (row["times"], row["weights equal"], row["steps twice"]) == (1, True, 0)


def test_a_stage_over_the_internet_has_the_blocks_of_the_preset(tmp_path):
    settings = settings_of(tmp_path, "wan", LARGE)
    assert [len(blocks) for blocks in settings.split()] == [3, 3, 3]
    assert (settings.model.dim, settings.model.ffn, settings.model.kv_heads) == (768, 2048, 4)
