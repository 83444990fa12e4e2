"""Where a stage has seen values that are not finite: step by step, so that the first is named.

Within a step microbatches do not depend on each other: the place decides which came first.
"""

import threading

import torch
from torch import Tensor

INPUT = "input"  # the activations that the stage below sent
FORWARD = "forward"  # this stage's own forward pass
GRADIENT = "gradient"  # what the stage above sent back
BACKWARD = "backward"  # this stage's own backward pass
NORMS = "norms"  # the tally that the stage above sent
PLACES = (INPUT, FORWARD, GRADIENT, BACKWARD, NORMS)
"""In the order in which one leads to the next."""


class Sightings:
    """What one stage has seen; noted by its links' threads and by the compute thread."""

    def __init__(self) -> None:
        self._places: dict[int, set[str]] = {}
        self._lock = threading.Lock()

    def note(self, step: int, place: str) -> None:
        """Values that are not finite were seen here."""
        with self._lock:
            self._places.setdefault(step, set()).add(place)

    def look(self, step: int, place: str, tensor: Tensor) -> None:
        """Note the place if this tensor is not finite."""
        if not is_finite(tensor):
            self.note(step, place)

    def take_first(self, step: int) -> str:
        """The first place of a step that is over, or nothing; it is forgotten."""
        with self._lock:
            seen = self._places.pop(step, set())
        return min(seen, key=PLACES.index, default="")


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite.

    A sum is not finite if any of its terms is not, and it reads a tensor only once. As finite
    terms may overflow too, a sum that is not finite is looked into.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
