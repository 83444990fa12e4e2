"""`[codec]`: how tensors become bytes, per direction and per cut."""

from dataclasses import dataclass

from thinwire.typed import option


@dataclass(frozen=True)
class CodecConfig:
    """`[codec]`: how tensors become bytes at the cut, chosen per direction."""

    forward: str = option("bf16", "activations: fp32, bf16 or fp16 (fp64 for exact tests)")
    backward: str = option("bf16", "gradients: fp32, bf16 or fp16 (fp64 for exact tests)")
