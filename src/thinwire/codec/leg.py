"""The two directions of a crossing."""

from enum import Enum


class Leg(Enum):
    """The direction of a crossing: activations go forward, gradients come backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
