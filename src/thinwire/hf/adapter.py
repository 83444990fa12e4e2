"""`thinwire export --adapter`: what a LoRA run has trained, as a folder that peft opens.

The model that it belongs to is not in it: that is the one the run started from, in plain weights.
"""

from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from thinwire.engine import Checkpoint
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.errors import ConfigError
from thinwire.hf.export import Wanted, check_target, new_folder
from thinwire.hf.tensors import TYPES
from thinwire.hf.tokenizer import write_json
from thinwire.model.adapter import UP, is_adapter
from thinwire.report import Display
from thinwire.report.human import human_bytes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the name that a tensor has in the model, as peft saves it."""


def export_adapter(checkpoint: Checkpoint, wanted: Wanted, base: str, display: Display) -> None:
    """Write the folder whole, or leave things as they were. `base` names the model for peft."""
    check_target(wanted, CONFIG)
    settings = checkpoint.settings
    if not settings.lora.rank:
        raise ConfigError(
            f"{checkpoint.folder} has no adapters (lora.rank = 0): all of its weights were "
            "trained. Export the whole model, without --adapter"
        )
    if why := why_not_folded(settings):
        raise ConfigError(
            f"the adapters of {checkpoint.folder} were trained together with its cuts, which a "
            f"plain model lacks. It has {why}. Export the whole model, without --adapter"
        )
    checkpoint.verify()
    dtype = TYPES[wanted.dtype]
    tensors = {
        f"{PREFIX}{name}": tensor.to(dtype).contiguous()
        for name, tensor in adapter_tensors(checkpoint).items()
    }
    size = human_bytes(sum(tensor.nbytes for tensor in tensors.values()))
    display.phase("write", f"{len(tensors)} tensors of adapters, {size} in {wanted.dtype}")
    with new_folder(wanted) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)
        write_json(folder / CONFIG, adapter_config(checkpoint, base))


def adapter_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """A and B of every adapter, beside plain weights: a B of coordinates becomes U B."""
    folded = Folded(checkpoint)
    names = {n for n in checkpoint.names() if is_adapter(n) and n.endswith(".weight")}
    found = checkpoint.tensors(names)
    for name in sorted(names):
        layer, part, _ = name.rsplit(".", 2)
        if part == UP:
            found[name] = folded.in_full(f"{layer}.weight", found[name])
    return dict(sorted(found.items()))


def adapter_config(checkpoint: Checkpoint, base: str) -> dict[str, Any]:
    """What peft must know to put the adapters where they belong."""
    lora = checkpoint.settings.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
