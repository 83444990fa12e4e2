"""What an arm is, what arms share, and what of it a log tells apart."""

from typing import Any

import pytest

from thinwire.settings import Settings
from thinwire_lab import arms
from thinwire_lab.arms import Arm


def test_an_arm_trains_its_changes_whatever_it_is_called() -> None:
    arm = Arm("thin", 3, 70, {"boundary": {"mode": "subspace", "rank": 8}, "optim": {"lr": 0.01}})
    settings = arm.settings({"model": {"preset": "mini"}, "boundary": {"free_layers": 1}})
    assert (settings.run.seed, settings.train.steps, settings.boundary.rank) == (3, 70, 8)
    assert settings.boundary.free_layers == 1 and settings.model.dim == 256
    assert arm.line == "thin  lr 0.01  seed 3  70 steps"
    assert Arm("x", 0, 5, {"pipeline": {"stages": 8}}).line == "8 stages  x  seed 0  5 steps"
    assert (arm.get("boundary.rank"), arm.get("codec.forward")) == (8, None)
    assert arm.is_same(Arm("other", 3, 70, arm.changes, {"colour": "red"}))
    assert not arm.is_same(Arm("thin", 3, 71, arm.changes))
    assert not arm.is_same(Arm("thin", 3, 70, {"boundary": {"mode": "subspace", "rank": 4}}))


@pytest.mark.parametrize(
    ("stages", "processes", "told", "threads"),
    [(1, 1, 0, 8), (1, 2, 0, 4), (4, 2, 0, 2), (1, 16, 0, 1), (1, 2, 3, 3)],
)
def test_arms_beside_each_other_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, stages: int, processes: int, told: int, threads: int
) -> None:
    for place in ("thinwire.settings.tree", "thinwire_lab.arms"):
        monkeypatch.setattr(f"{place}.machine_cores", lambda: 8)
    arm = Arm("x", 0, 5, {"pipeline": {"stages": stages}})
    assert arm.settings_beside({"run": {"threads": told}}, processes).run.threads == threads


def test_a_ground_is_named_by_what_matters() -> None:
    def named(**values: dict[str, Any]) -> dict[str, Any]:
        return arms.differences(Settings.from_plain(values))

    assert named() == {}
    assert named(train={"steps": 70, "keep": 9}, run={"seed": 5, "name": "x"}) == named()
    assert named(optim={"weight_decay": 0.2})["optim.weight_decay"] == 0.2
    assert named(model={"preset": "mini"})["model.dim"] == 256
    assert named(run={"precision": "bf16"}) == {"run.precision": "bf16"}
    assert named(codec={"forward": "int8"}) == {"codec.forward": "int8"}


def test_patterns() -> None:
    assert arms.split_patterns("a*, int4(group=64,hadamard)/int8 ,b") == [
        "a*",
        "int4(group=64,hadamard)/int8",
        "b",
    ]
