"""Recipes as arms of a comparison: what `thinwire init --recipe` writes, beside controls.

An arm is the name of a recipe, with settings of its own behind it where asked, such as
"thin32 boundary.table=128". All share the recipes' optimizer and rates.
"""

import itertools
from collections.abc import Sequence

from thinwire.errors import ConfigError
from thinwire.recipes import RATES, SHEETS, is_muon, rates_of, sized
from thinwire.settings import Settings, apply_override, merged
from thinwire_lab.arms import Arm, Values, split_patterns
from thinwire_lab.experiment import sheet

DENSE = "dense"
_OPEN: Values = {"boundary": {"rank": 0, "ratio": 0.0, "anchor": "auto"}}


def with_rates(base: Values) -> Values:
    """A base with the recipes' rates for its model, where it does not set them itself.

    They are rates of Muon: a base with another optimizer stays as it is.
    """
    if not is_muon(base):
        return base
    return merged({"optim": RATES[rates_of(_preset(base))]}, base)


def _preset(base: Values) -> str:
    return Settings.as_asked({"model": base["model"]}).model.preset


def recipe_grid(
    names: str,
    base: Values,
    lrs: Sequence[float],
    stages: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    dense_seeds: Sequence[int] = (),
) -> list[Arm]:
    """Each recipe at every number of stages, learning rate and seed; plain dense is in any grid.

    Plain dense is trained for the first number of stages only, where it shows the noise. What a
    recipe sets by the size of the model is that of the base's, if it trains with Muon.
    """
    lines = [line for line in split_patterns(names) if line != DENSE]
    dense = itertools.product([DENSE], stages[:1], lrs, dense_seeds or seeds)
    others = itertools.product(lines, stages, lrs, seeds)
    return [_arm(*choice, steps, base) for choice in itertools.chain(dense, others)]


def _arm(line: str, stages: int, lr: float, seed: int, steps: int, base: Values) -> Arm:
    changes = merged(_changes(line, base), {"pipeline": {"stages": stages, "schedule": "gpipe"}})
    return Arm(line, seed, steps, merged(changes, {"optim": {"lr": lr}}))


def _changes(line: str, base: Values) -> Values:
    """What a recipe sets at the cut and for this model, and the settings behind its name."""
    name, *own = line.split()
    known = SHEETS | sheet("convergence")["controls"]
    if name not in known:
        raise ConfigError(f'--recipes "{line}": a recipe is one of {", ".join(known)}')
    chosen = {section: known[name][section] for section in ("boundary", "codec")}
    of_size = sized(name, _preset(base)) if is_muon(base) else {}
    changes = merged(merged(_OPEN, chosen), of_size)
    for override in own:
        apply_override(changes, override)
    return changes
