"""Benchmarks through the lm-eval harness, on an exported model.

The harness opens a model with transformers, so a checkpoint is exported to a temporary folder
first. That is the model by its weights, boundaries included: what codecs do at its cuts is not.
"""

import tempfile
from pathlib import Path
from typing import Any

import thinwire.hf  # noqa: F401 -- models whose cuts do not fold open by the class it registers
from thinwire.engine.build import choose_device
from thinwire.engine.checkpoint import Checkpoint
from thinwire.errors import ConfigError
from thinwire.hf.export import Wanted, export
from thinwire.hf.folder import CONFIG
from thinwire.lazy import needs
from thinwire.report import Display

WHAT = "--lm-eval"


def run_tasks(
    place: Path,
    tasks: list[str],
    display: Display,
    device: str = "auto",
    limit: int = 0,
    folder: Path | None = None,
    allow_plugins: bool = False,
) -> dict[str, dict[str, Any]]:
    """Scores by task and metric; `limit` examples of each task, 0 = all.

    `folder` has task files of the user's own. The harness loads the data of its tasks itself.
    """
    harness = needs("lm_eval", "eval", WHAT)
    needs("transformers", "hf", WHAT)
    tasks_of = needs("lm_eval.tasks", "eval", WHAT).TaskManager
    manager = tasks_of(include_path=str(folder) if folder else None)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise ConfigError(
                f"the lm-eval harness has no task {task!r}: `python -m lm_eval ls tasks` lists "
                "them, and --tasks-folder adds a folder of your own"
            )
    with tempfile.TemporaryDirectory(prefix="thinwire-eval-") as scratch:
        model = place
        if not (place / CONFIG).is_file():  # no exported model yet
            checkpoint = Checkpoint.open(place, allow_plugins)
            model = Path(scratch) / checkpoint.settings.run.name
            export(checkpoint, Wanted(model, verify=False), display)
        display.phase("lm-eval", f"{', '.join(tasks)} on {place}")
        found = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32"},
            tasks=tasks,
            device=str(choose_device(device, 0)),
            limit=limit or None,
            task_manager=manager,
            log_samples=False,
        )
    return found["results"]


def scores_text(results: dict[str, dict[str, Any]]) -> str:
    """A line for each number of each task."""
    lines = []
    for task, scores in results.items():
        for metric, value in scores.items():
            name, _, _ = metric.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = scores.get(metric.replace(name, f"{name}_stderr", 1))
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                lines.append(f"{task}: {name} {value:.4f}{spread}")
    return "\n".join(lines)
