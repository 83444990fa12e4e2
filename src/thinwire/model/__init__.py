"""Models as plain lists of layers, and the stage that holds some of them (floor 3)."""

from thinwire.model.architecture import architecture
from thinwire.model.base import Architecture, LayerPlan
from thinwire.model.config import PRESETS, ModelConfig
from thinwire.model.llama import llama_layers
from thinwire.model.loss import Score, token_loss
from thinwire.model.narrow import Narrow
from thinwire.model.stage import Past, Stage

__all__ = [
    "PRESETS",
    "Architecture",
    "LayerPlan",
    "ModelConfig",
    "Narrow",
    "Past",
    "Score",
    "Stage",
    "architecture",
    "llama_layers",
    "token_loss",
]
