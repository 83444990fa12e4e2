"""Arms of fine-tuning start from a trained model, as a run would."""

from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.data import Corpus
from thinwire.errors import ConfigError
from thinwire.settings import Settings, merged
from thinwire_lab import finetune as lab
from thinwire_lab.experiment import sheet
from thinwire_lab.pool import Trained
from trained import trained


def test_every_line_of_the_grid_is_an_arm_that_can_work() -> None:
    base = {"model": {"preset": "160m"}, "train": {"init_from": "somewhere"},
            "pipeline": {"microbatches": 1, "schedule": "gpipe"}}  # fmt: skip
    arms = lab.make_arms(lab.specs(None, False), 768, [3e-4], [0, 1], 400)
    grids = sheet("finetune")["grid"]
    assert len(arms) == len(grids["usual"]) + 1  # dense has a second seed
    boundaries = {arm.label: arm.settings(base).boundary for arm in arms}
    assert boundaries["random d/8 int8/int4"].rank == 96
    assert set(grids["quick"]) <= set(grids["usual"])
    with pytest.raises(ConfigError, match=r"CUT \[RANK\]"):
        lab.specs("randm*", False)


def test_a_small_map(
    make_settings: Callable[..., Settings], corpus: Corpus, text_folder: Path, tmp_path: Path
) -> None:
    """Two arms in this process, as their own would train them, and the report of both."""
    plain = make_settings(train__steps=20)
    source = trained(plain, corpus, tmp_path / "source")
    base = merged(plain.to_plain(), {"run": {"precision": "fp32"}, "optim": {"lr": 1e-2}})
    base = merged(base, {"pipeline": {"microbatches": 1, "window": 0, "schedule": "gpipe"}})
    base = merged(base, {"train": {"init_from": str(source)}})
    arms = lab.make_arms([lab.DENSE, "random d/2 int8/int4"], 32, [1e-2], [0], 10)
    shared = {"base": base, "data": str(corpus.folder), "processes": 1}
    found = lab.outcome([Trained(arm, lab.train(arm, shared)) for arm in arms], "text")
    dense, narrow = found.rows
    assert dense["loss before"] <= narrow["loss before"]
    assert narrow["ratio"] > 3 and narrow["gap"] is not None
    assert "10 steps" in found.too_small and narrow["arm"] in " ".join(found.notes) + found.verdict
