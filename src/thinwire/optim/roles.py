"""What a parameter is to an optimizer. Models and boundaries say it of theirs."""

from enum import Enum


class Role(Enum):
    """Parameters with a learning rate of their own. Most have no role."""

    MATRIX = "matrix"  # between hidden states, in blocks and at cuts: what Muon is for
    TABLE = "table"  # a row per token: the embedding, and the tables of stages' own
    HEAD = "head"
