"""`thinwire export`: a checkpoint as a folder that transformers opens, or its adapters for peft.

The folder is written under a hidden name beside its own, verified, and renamed at the end. People
publish such folders: no path of the machine that trained the model goes into one.
"""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

import thinwire
from thinwire.engine.build import model_weights
from thinwire.engine.checkpoint import Checkpoint, checkpoints_folder
from thinwire.engine.conversion import Folded, why_not_folded
from thinwire.errors import ConfigError, ThinwireError
from thinwire.hf.cuts import WithCuts, config_with_cuts
from thinwire.hf.folder import (
    CONFIG,
    EXPORT_TYPES,
    check_target,
    new_folder,
    write_json,
    write_model,
)
from thinwire.hf.importer import IMPORTED
from thinwire.hf.shape import config_of, kind_of
from thinwire.hf.tokenizer import GENERATION, TokenizerFiles
from thinwire.hf.verify import AUTO_TOKENIZER, Verified, verify
from thinwire.lazy import needs
from thinwire.model import LoraConfig
from thinwire.model.adapter import UP, is_adapter
from thinwire.report import Display
from thinwire.report.human import human_bytes, human_count
from thinwire.report.metrics import losses_of
from thinwire.report.records import EvaluationRecord
from thinwire.settings import Settings

CARD = "README.md"
SHARD_BYTES = 5_000_000_000
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the name that a tensor has in the model, as peft saves it."""
_OPENING = """\
```python
{register}from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = {tokenizer}.from_pretrained("{name}")
```
"""
_REGISTER = "import thinwire.hf  # registers the model class\n"
_WITH_CUTS = """\
Its cuts are part of the model and do not fold into the weights of an ordinary Llama, so it needs
`pip install 'thinwire[hf]'`:

"""


@dataclass(frozen=True)
class Wanted:
    """How a checkpoint is to be exported."""

    folder: Path
    dtype: str = "fp32"
    replace: bool = False
    verify: bool = True
    tokenizer: Path | None = None
    shard_bytes: int = SHARD_BYTES


def export(checkpoint: Checkpoint, wanted: Wanted, display: Display) -> None:
    """Write the folder, whole and verified, or leave things as they were."""
    check_target(wanted.folder, wanted.replace, CONFIG)
    if wanted.verify:
        needs("transformers", "hf", "verifying the export (--no-verify leaves it out)")
    checkpoint.verify()
    tokenizer = TokenizerFiles(checkpoint, wanted.tokenizer)
    why_not, dtype = why_not_folded(checkpoint.settings), EXPORT_TYPES[wanted.dtype]
    weights = WithCuts(checkpoint) if why_not else Folded(checkpoint)
    if why_not:
        display.note(
            f"this model does not fold into an ordinary Llama. It has {why_not}.\n"
            "It is exported with its cuts: after `import thinwire.hf`, which registers its class, "
            "AutoModelForCausalLM opens it"
        )
    with new_folder(wanted.folder) as folder:
        model, ends = weights.settings.model, tokenizer.generation()
        config = {
            **(config_with_cuts(weights.settings) if why_not else config_of(model)),
            # Not the one for padding: transformers would take it out of training.
            **{key: value for key, value in ends.items() if key != "pad_token_id"},
            "use_cache": True,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "thinwire_version": thinwire.__version__,
        }
        write_json(folder / CONFIG, config)
        tokenizer.write(folder)
        if not (folder / GENERATION).exists():
            write_json(folder / GENERATION, ends)
        size = human_bytes(sum(map(math.prod, weights.shapes.values())) * dtype.itemsize)
        display.phase("write", f"{len(weights.shapes)} tensors, {size} in {wanted.dtype}")
        write_model(folder, weights.shapes, dtype, weights.tensor, wanted.shard_bytes)
        found = None
        if wanted.verify:
            display.phase("verify", "opening it with transformers")
            found = verify(folder, weights, dtype, checkpoint, tokenizer)
            display.phase("verify", str(found))
            if found.tokenizer_class != AUTO_TOKENIZER:
                display.note(
                    f"{AUTO_TOKENIZER} has rules of its own for models of this type, which give "
                    f"other ids: open the tokenizer with {found.tokenizer_class}, as {CARD} says"
                )
        card = model_card(checkpoint, wanted.folder.name, wanted.dtype, not why_not, found)
        (folder / CARD).write_text(card, encoding="utf-8")


def model_card(
    checkpoint: Checkpoint, name: str, dtype: str, is_plain: bool, verdict: Verified | None
) -> str:
    """The whole text; `verdict` says how it was verified, if it was."""
    settings = checkpoint.settings
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(checkpoint).items())
    tags = "tags:\n- thinwire\n" + (f"- {kind_of(settings.model)}\n" if is_plain else "")
    # Of the model as it is exported: adapters are merged.
    parameters = model_weights(dataclasses.replace(settings, lora=LoraConfig())).count
    about = f"A language model of {human_count(parameters)} parameters, "
    if origin := checkpoint.manifest.get(IMPORTED):
        about += f"imported into thinwire from `{origin}`"
    else:
        about += f"trained with thinwire in {settings.pipeline.stages} pipeline stages"
    tokenizer = verdict.tokenizer_class if verdict else AUTO_TOKENIZER
    register = "" if is_plain else _REGISTER
    opening = _OPENING.format(name=name, tokenizer=tokenizer, register=register)
    opening = opening if is_plain else _WITH_CUTS + opening
    checked = f"\nVerified when it was exported: {verdict}.\n" if verdict else ""
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{tags}---\n\n"
        f"# {name}\n\n"
        f"{about} and exported in {dtype}.\n\n"
        f"{opening}{checked}\n"
        f"## {'What it is' if origin else 'How it was trained'}\n\n| | |\n|---|---|\n{facts}\n"
    )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    settings, step = checkpoint.settings, checkpoint.step
    model, optim, data = settings.model, settings.optim, settings.data
    corpus = checkpoint.manifest["corpus"]
    shape = (
        f"{model.layers} blocks of width {model.dim}, {model.heads} heads ({model.kv_heads} for "
        f"keys and values), feed-forward {model.ffn}, vocabulary {model.vocab}, context "
        f"{model.context}"
    )
    if IMPORTED in checkpoint.manifest:
        return {"model": shape, "thinwire": thinwire.__version__}
    lora, adapters = settings.lora, {}
    if lora.rank:
        about = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}"
        adapters = {"adapters": f"{about}; merged into the weights"}
    place = settings.train.init_from  # of which its name is said, without the path to it
    facts = {
        "model": shape,
        "steps": f"{step:,} of {settings.train.steps:,}",
        "tokens": f"{step * settings.tokens_per_step:,}, {settings.tokens_per_step:,} per step",
        **({"started from": f"`{Path(place).name}`"} if place else {}),
        "data": f"source `{data.source}`" + (f", fingerprint `{corpus}`" if corpus else ""),
        **_losses(checkpoint),
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, weight decay "
        f"{optim.weight_decay:g}, warmup {optim.warmup} steps, clip {optim.clip:g}",
        **adapters,
        "precision": settings.run.precision,
        "seed": str(settings.run.seed),
        "cuts": _cuts(settings),
        "codecs": f"`{settings.codec.forward}` forward, `{settings.codec.backward}` back "
        "(in training only: not part of this model)",
        "settings hash": f"`{settings.hash}`",
        "thinwire": thinwire.__version__,
    }
    if settings.pipeline.stages == 1:
        facts.pop("codecs")
    return facts


def _cuts(settings: Settings) -> str:
    boundary, count = settings.boundary, settings.pipeline.stages - 1
    if not count:
        return "none"
    if boundary.mode == "dense":
        return f"{count}, dense"
    anchor = f", token table `{boundary.anchor}`" if boundary.anchor != "none" else ""
    if boundary.shares_embedding:
        anchor = ", around the embedding that all stages share"
    return f"{count}, `{boundary.mode}` of rank {boundary.rank}{anchor}"


def _losses(checkpoint: Checkpoint) -> dict[str, str]:
    """The last losses before the checkpoint, if its run has kept them beside it."""
    run = checkpoint.folder.parent.parent
    found: dict[str, str] = {}
    if checkpoint.folder.parent != checkpoints_folder(run):
        return found
    with contextlib.suppress(OSError, ThinwireError):  # a card is not worth failing for
        for record in losses_of(run):
            if record.step <= checkpoint.step and record.loss is not None:
                kind = "validation" if isinstance(record, EvaluationRecord) else "training"
                found[f"{kind} loss"] = f"{record.loss:.4f} (step {record.step:,})"
    return found


def export_adapter(checkpoint: Checkpoint, wanted: Wanted, base: str, display: Display) -> None:
    """Write what a LoRA run has trained as a folder for peft, whole, or leave things as they were.

    The model that it belongs to is not in it; `base` names it for peft.
    """
    check_target(wanted.folder, wanted.replace, ADAPTER_CONFIG)
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
    dtype = EXPORT_TYPES[wanted.dtype]
    folded, found = Folded(checkpoint), {}
    names = {n for n in checkpoint.names() if is_adapter(n) and n.endswith(".weight")}
    for name, tensor in sorted(checkpoint.tensors(names).items()):
        layer, part, _ = name.rsplit(".", 2)
        # Beside plain weights a B of coordinates becomes U B.
        whole = folded.in_full(f"{layer}.weight", tensor) if part == UP else tensor
        found[f"{PREFIX}{name}"] = whole.to(dtype).contiguous()
    size = human_bytes(sum(tensor.nbytes for tensor in found.values()))
    display.phase("write", f"{len(found)} tensors of adapters, {size} in {wanted.dtype}")
    lora = settings.lora
    config = {
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
    with new_folder(wanted.folder) as folder:
        save_file(found, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_WEIGHTS).chmod(0o644)
        write_json(folder / ADAPTER_CONFIG, config)
