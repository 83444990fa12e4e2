"""What `run.precision` means for tensors."""

import torch

WEIGHT_TYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""The type weights are kept in; bf16 keeps fp32 weights and computes under autocast."""
