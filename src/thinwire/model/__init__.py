"""Models as plain lists of layers, and the stage that holds some of them (floor 3)."""

from typing import TYPE_CHECKING

from thinwire.lazy import on_first_use
from thinwire.model.config import PRESETS, ModelConfig
from thinwire.model.lora import LoraConfig

if TYPE_CHECKING:
    from thinwire.model.base import Architecture, LayerPlan
    from thinwire.model.llama import architecture
    from thinwire.model.loss import Score, token_loss
    from thinwire.model.narrow import Narrow
    from thinwire.model.stage import Past, Stage

__all__ = [
    "PRESETS",
    "Architecture",
    "LayerPlan",
    "LoraConfig",
    "ModelConfig",
    "Narrow",
    "Past",
    "Score",
    "Stage",
    "architecture",
    "token_loss",
]

__getattr__ = on_first_use(
    __name__,
    {
        "base": ("Architecture", "LayerPlan"),
        "llama": ("architecture",),
        "loss": ("Score", "token_loss"),
        "narrow": ("Narrow",),
        "stage": ("Past", "Stage"),
    },
)
