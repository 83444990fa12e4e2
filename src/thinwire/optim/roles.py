"""What a parameter is to an optimizer, by its global name."""

from enum import Enum

from torch import Tensor


class Role(Enum):
    """Parameters that are treated alike."""

    MATRIX = "matrix"  # between hidden states, in blocks and at cuts: what Muon is for
    TABLE = "table"  # a row per token: the embedding, and what a cut's receiver knows of a token
    HEAD = "head"
    BASIS = "basis"  # of a cut, learned
    GAIN = "gain"
    OTHER = "other"  # convolutions, and what has no role of its own


def role_of(name: str, parameter: Tensor) -> Role:
    """The role of a parameter in a model whose names are those of a Hugging Face Llama."""
    if parameter.ndim < 2:
        return Role.GAIN
    if name.endswith(".basis"):
        return Role.BASIS
    if name == "model.embed_tokens.weight" or name.endswith(".table"):
        return Role.TABLE
    if name == "lm_head.weight":
        return Role.HEAD
    is_matrix = name.startswith("model.layers.") or name.endswith(".widen")
    return Role.MATRIX if is_matrix else Role.OTHER
