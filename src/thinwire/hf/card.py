"""README.md of an exported model: what it is, how it was trained, how to open it.

People publish such folders: no path of the machine that trained the model goes into it.
"""

import contextlib
import dataclasses
from pathlib import Path

import thinwire
from thinwire.engine import Checkpoint
from thinwire.engine.build import parameter_count
from thinwire.engine.checkpoint import checkpoints_folder
from thinwire.errors import ThinwireError
from thinwire.hf.importer import IMPORTED
from thinwire.hf.shape import kind_of
from thinwire.hf.verify import AUTO_TOKENIZER, Verdict
from thinwire.model import LoraConfig
from thinwire.report.human import human_count
from thinwire.report.metrics import losses_of
from thinwire.report.records import EvaluationRecord
from thinwire.settings import Settings

_PLAIN = """\
```python
from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = {tokenizer}.from_pretrained("{name}")
```
"""
_WITH_CUTS = """\
Its cuts are part of the model and do not fold into the weights of an ordinary Llama, so it needs
`pip install 'thinwire[hf]'`:

```python
import thinwire.hf  # registers the model class
from transformers import AutoModelForCausalLM, {tokenizer}

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = {tokenizer}.from_pretrained("{name}")
```
"""


def model_card(
    checkpoint: Checkpoint, name: str, dtype: str, is_plain: bool, verdict: Verdict | None
) -> str:
    """The whole text; `verdict` says how it was verified, if it was."""
    settings = checkpoint.settings
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(checkpoint).items())
    tags = "tags:\n- thinwire\n" + (f"- {kind_of(settings.model)}\n" if is_plain else "")
    parameters = parameter_count(_without_adapters(settings))
    about = f"A language model of {human_count(parameters)} parameters, "
    if origin := checkpoint.manifest.get(IMPORTED):
        about += f"imported into thinwire from `{origin}`"
    else:
        about += f"trained with thinwire in {settings.pipeline.stages} pipeline stages"
    tokenizer = verdict.tokenizer_class if verdict else AUTO_TOKENIZER
    opening = (_PLAIN if is_plain else _WITH_CUTS).format(name=name, tokenizer=tokenizer)
    checked = f"\nVerified when it was exported: {verdict}.\n" if verdict else ""
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{tags}---\n\n"
        f"# {name}\n\n"
        f"{about} and exported in {dtype}.\n\n"
        f"{opening}{checked}\n"
        f"## {'What it is' if origin else 'How it was trained'}\n\n| | |\n|---|---|\n{facts}\n"
    )


def _without_adapters(settings: Settings) -> Settings:
    """Of the model as it is exported: adapters are merged."""
    return dataclasses.replace(settings, lora=LoraConfig())


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
    facts = {
        "model": shape,
        "steps": f"{step:,} of {settings.train.steps:,}",
        "tokens": f"{step * settings.tokens_per_step:,}, {settings.tokens_per_step:,} per step",
        **_origin(settings),
        "data": f"source `{data.source}`" + (f", fingerprint `{corpus}`" if corpus else ""),
        **_losses(checkpoint),
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, weight decay "
        f"{optim.weight_decay:g}, warmup {optim.warmup} steps, clip {optim.clip:g}",
        **_adapters(settings),
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


def _origin(settings: Settings) -> dict[str, str]:
    """The name of what training started from, without the path to it."""
    place = settings.train.init_from
    return {"started from": f"`{Path(place).name}`"} if place else {}


def _adapters(settings: Settings) -> dict[str, str]:
    lora = settings.lora
    if not lora.rank:
        return {}
    about = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, beside {', '.join(lora.targets)}"
    return {"adapters": f"{about}; merged into the weights"}


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
    if not _is_of_run(checkpoint.folder, run):
        return found
    with contextlib.suppress(OSError, ThinwireError):  # a card is not worth failing for
        for record in losses_of(run):
            if record.step <= checkpoint.step and record.loss is not None:
                kind = "validation" if isinstance(record, EvaluationRecord) else "training"
                found[f"{kind} loss"] = f"{record.loss:.4f} (step {record.step:,})"
    return found


def _is_of_run(folder: Path, run: Path) -> bool:
    return folder.parent == checkpoints_folder(run)
