"""Models as plain lists of layers, and the stage that holds some of them (floor 3)."""

from thinwire.model.config import PRESETS, ModelConfig, parameter_count
from thinwire.model.llama import LayerPlan, llama_layers, stage_layers
from thinwire.model.narrow import Narrow
from thinwire.model.stage import Stage, token_loss

__all__ = [
    "PRESETS",
    "LayerPlan",
    "ModelConfig",
    "Narrow",
    "Stage",
    "llama_layers",
    "parameter_count",
    "stage_layers",
    "token_loss",
]
