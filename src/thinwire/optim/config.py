"""`[optim]` and the learning rate as a pure function of the step."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.typed import option

AUTO_WARMUP = 20  # steps, in a run of at least twice as many
NOTICEABLE_CHANGE = 0.05  # of a learning rate, as a share
EQUAL_SHARES = {"matrix_lr": 1.0, "table_lr": 1.0, "head_lr": 1.0}
MUON_SHARES = {"matrix_lr": 3.0, "table_lr": 100.0, "head_lr": 10.0}
SLOW_TABLES_LR = 30.0  # with muon, where every stage has a token table of its own, in a long run
SHORT_RUN = 1000  # steps; longer runs want slower tables
WSD_DECAY_SHARE = 0.2  # the last share of the steps in which WSD comes down to zero


@dataclass(frozen=True)
class OptimConfig:
    """`[optim]`: the optimizer and its learning rate over the run."""

    name: str = option(
        "adamw",
        "adamw; muon (matrices of the blocks; adamw for the rest)",
        ("adamw", "muon"),
    )
    lr: float = option(3e-3, "peak learning rate", above=0)
    weight_decay: float = option(
        0.1,
        "decoupled weight decay of matrices",
        least=0,
    )
    warmup: int = option(
        -1, "steps of linear warmup; -1 = 20, or half of a shorter run", least=0, auto=-1
    )
    schedule: str = option(
        "cosine", "learning-rate schedule after the warmup", ("cosine", "linear", "wsd", "constant")
    )
    floor: float = option(0.1, "cosine: final learning rate as a fraction of lr", least=0, most=1)
    matrix_lr: float = option(
        -1.0,
        "muon: learning rate of the blocks' matrices as a fraction of lr; -1 = 3",
        least=0,
        auto=-1,
    )
    table_lr: float = option(
        -1.0,
        "learning rate of token tables (the embedding, those of cuts) as a fraction of lr; -1 = "
        "100 with muon (30 with boundary.anchor = per-stage in more than 1,000 steps), else 1",
        least=0,
        auto=-1,
    )
    head_lr: float = option(
        -1.0,
        "learning rate of the output head as a fraction of lr; -1 = 10 with muon, else 1",
        least=0,
        auto=-1,
    )
    clip: float = option(1.0, "clip the global gradient norm to this; 0 = no clipping", least=0)

    def resolved(self, steps: int, own_tables: bool = False) -> "OptimConfig":
        """The same config with the warmup and the shares filled in for a run of `steps` steps.

        `own_tables`: every stage has a token table of its own.
        """
        warmup = min(AUTO_WARMUP, steps // 2) if self.warmup == -1 else self.warmup
        if warmup > steps:
            raise ConfigError(
                f"optim.warmup = {warmup} is longer than train.steps = {steps}: the learning rate "
                "would never reach its peak"
            )
        has_slow_tables = own_tables and steps > SHORT_RUN
        return dataclasses.replace(self.with_shares(has_slow_tables), warmup=warmup)

    @property
    def embed_std(self) -> float:
        """The spread of an embedding at the start that was best with this optimizer."""
        return 1.0 if self.name == "muon" else 0.02

    def with_shares(self, has_slow_tables: bool = False) -> "OptimConfig":
        """The same config with every rate that is a share of lr filled in."""
        auto = MUON_SHARES if self.name == "muon" else EQUAL_SHARES
        if self.name == "muon" and has_slow_tables:
            auto = auto | {"table_lr": SLOW_TABLES_LR}
        filled: dict[str, Any] = {k: share for k, share in auto.items() if getattr(self, k) == -1}
        return dataclasses.replace(self, **filled)

    def relaxed(self, steps: int, own_tables: bool = False) -> "OptimConfig":
        """The inverse of `resolved`: -1 for what -1 would give anyway."""
        auto = self
        for key in ("warmup", *EQUAL_SHARES):
            freer: OptimConfig = dataclasses.replace(auto, **{key: -1})  # type: ignore[arg-type]
            if freer.resolved(steps, own_tables) == self:
                auto = freer
        return auto


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of update number `step` (from 0) in a run of `steps` updates."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    span = max(1, steps - config.warmup)
    progress = min(1.0, (step - config.warmup) / span)
    if config.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
        return config.lr * (config.floor + (1 - config.floor) * share)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "wsd":
        return config.lr * min(1.0, (1 - progress) / WSD_DECAY_SHARE)
    return config.lr


def share_changes(before: OptimConfig, now: OptimConfig) -> str:
    """What becomes of the rates that are shares of lr; empty where they stay. One that was left
    open may follow the number of steps.
    """
    changed = [key for key in EQUAL_SHARES if getattr(before, key) != getattr(now, key)]
    told = [f"optim.{k} was {getattr(before, k):g} and is {getattr(now, k):g} now" for k in changed]
    return ", ".join(told)


def rate_change(
    before: OptimConfig, steps_before: int, now: OptimConfig, steps_now: int, done: int
) -> str:
    """What becomes of the learning rate after `done` updates, if another schedule takes over.

    Empty where the next rate is about what it would have been.
    """
    due = learning_rate(before, done, steps_before)
    next_rate = learning_rate(now, done, steps_now)
    if math.isclose(due, next_rate, rel_tol=NOTICEABLE_CHANGE):
        return ""
    last = learning_rate(before, max(0, done - 1), steps_before)
    return (
        f"the learning rate was {last:.3g} at the checkpoint and continues at {next_rate:.3g}: its "
        "schedule is different (optim.lr, optim.warmup, optim.schedule or train.steps changed)"
    )
