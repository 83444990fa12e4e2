"""The run.toml that an import leaves beside the model: settings to fine-tune it with."""

import re
import shlex
from pathlib import Path

from thinwire.engine.checkpoint import TOKENIZER
from thinwire.settings import Settings
from thinwire.typed import to_plain, to_toml

_HEAD = """\
# Fine-tunes {name}: a new run whose weights begin as those of {place}.
# Start it: thinwire train {file}          Its cost beforehand: thinwire plan {file}
#
# - Your text: set data.source and data.path. Until then it trains on Python's own source code.
# - Weights are read into fp32 whatever they are stored in; run.precision = "bf16" computes in bf16
#   on a GPU, with weights kept in fp32.
# - All channels cross the cuts, in 8 bits forward and 4 backward, which changes a trained model
#   little. A narrow boundary.mode with a random basis would ruin what it has learned.
# - AdamW at a small rate and with little decay: larger ones forget what the model knows.
# - lora.rank = 16 trains small adapters (LoRA) instead of all weights; optim.lr = 2e-4 suits them.
"""


def run_toml(name: str, imported: Settings, folder: Path) -> str:
    """Settings for fine-tuning the model of an import in its (absolute) folder."""
    values = {
        "run": {"name": _run_name(folder.name)},
        "model": to_plain(imported.relaxed().model),
        "data": {"tokenizer": str(folder / TOKENIZER)},
        "pipeline": {"stages": imported.pipeline.stages},
        "boundary": {"mode": "dense"},
        "codec": {"forward": "int8", "backward": "int4"},
        "optim": {"name": "adamw", "lr": 2e-5, "weight_decay": 0.01},
        "train": {"steps": 200, "batch": 8, "init_from": str(folder)},
    }
    asked = Settings.as_asked(values)
    asked.resolved()
    shown = {
        "name": _one_line(name),
        "place": _one_line(folder),
        "file": shlex.quote(_one_line(folder / "run.toml")),
    }
    return f"{_HEAD.format(**shown)}\n{to_toml(asked)}"


def _run_name(folder: str) -> str:
    """A name for the run: the folder's, of what such a name may have."""
    kept = re.sub(r"[^\w .@+-]", "-", folder).encode()[:80].decode(errors="ignore")
    return f"{kept.strip(' .-_@+') or 'imported'}-tuned"


def _one_line(text: object) -> str:
    """A name or path within a comment, where a line break would end it."""
    return " ".join(str(text).split())
