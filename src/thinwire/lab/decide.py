"""When runs are too small to decide anything: the same rules for every experiment.

A run decides nothing if it has too few steps, if nobody knows how much chance moves its loss
(dense has one seed), or if the effect is no larger than that. Each rule returns the reason in
words, or nothing.
"""

CAST_NOISE = 0.008
"""How far a loss after 400 steps moved when only the wire's cast changed: docs/results.md."""


def too_short(steps: int, least: int) -> str:
    """Fewer steps than a question needs."""
    return f"{steps} steps, where at least {least} are needed" if steps < least else ""


def one_seed(noise: float | None) -> str:
    """Noise that nobody has measured."""
    return "dense has one seed, so the noise is unknown" if noise is None else ""


def noise_note(noise: float | None) -> str:
    """The noise floor to print beside a table of losses, most of them from one seed."""
    seeds = "dense has one seed" if noise is None else f"the dense seeds differ by {noise:.2%}"
    return (
        f"noise: {seeds}; changing only the wire's cast moved a loss after 400 steps by up "
        f"to {CAST_NOISE:.1%}, so do not read smaller differences as effects"
    )
