"""The commands that exchange models with other programs: Hugging Face folders, in and out."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from thinwire.arguments import add_value, number

AddCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]
AddOptions = Callable[[argparse.ArgumentParser], None]


def add_hf_commands(add: AddCommand, add_plugins: AddOptions) -> None:
    """Put `import` and `export` on the command line."""
    sub = add("import", import_command, "make a checkpoint of a Hugging Face or GGUF model")
    sub.add_argument(
        "model",
        metavar="DIR_OR_NAME",
        help="a folder with config.json and safetensors, a .gguf file, or a name on the hub",
    )
    sub.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="folder to write, as models/NAME"
    )
    add_value(sub, "--stages", number(int, 1), "number of pipeline stages", 4)
    about_context = "tokens per sequence; 0 = as many as the model can see, at most 2048"
    add_value(sub, "--context", number(int, 0), about_context, 0)
    sub.add_argument("--force", action="store_true", help="replace an earlier import")

    sub = add("export", export_command, "write a checkpoint as a Hugging Face model folder")
    sub.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a run folder (its newest checkpoint)"
    )
    sub.add_argument("--to", choices=("hf",), default="hf", help="format (default: hf)")
    sub.add_argument("folder", type=Path, help="folder to write")
    sub.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="type of the weights: as trained, or rounded to half the size (default: fp32)",
    )
    add_value(sub, "--shard-gb", number(float, above=0), "most GB of one weight file", 5.0)
    sub.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, or the folder of one, for a run that was trained without",
    )
    sub.add_argument(
        "--adapter",
        action="store_true",
        help="of a LoRA run: write the adapters alone, as a folder that peft opens",
    )
    sub.add_argument(
        "--base",
        default="",
        metavar="NAME",
        help="with --adapter: the model that they belong to, a folder or a name on the hub",
    )
    sub.add_argument("--force", action="store_true", help="replace a model that is there already")
    sub.add_argument(
        "--no-verify",
        action="store_true",
        help="do not open the result with transformers to compare it with the trained model",
    )
    add_plugins(sub)


def import_command(options: argparse.Namespace) -> None:
    """Import a model, and say what became of it and what comes next."""
    from thinwire.hf.importer import check_import, opened, plan_import, write_import
    from thinwire.paths import expanded
    from thinwire.report import open_display

    target = expanded(options.to, "--to")
    check_import(target, options.force)
    with open_display(sys.stderr) as display, opened(options.model) as origin:
        plan = plan_import(origin, options.stages, options.context)
        write_import(
            plan,
            target,
            options.force,
            lambda done, total: display.progress("import", done, total, "B"),
        )
    model, stages = plan.settings.model, plan.settings.pipeline.stages
    kind = origin.config["model_type"]
    print(
        f"imported {origin.name} ({kind}, {plan.parameters:,} parameters, {plan.formats}) as "
        f"{target}: {model.layers} blocks in {stages} stages, context {model.context:,}"
    )
    for note in plan.notes:
        print(f"note: {note}")
    folder, settings = shlex.quote(str(target)), shlex.quote(str(target / "run.toml"))
    print(f"next: thinwire generate {folder}, thinwire train {settings}")


def export_command(options: argparse.Namespace) -> None:
    """Export a checkpoint, and say how it can be opened."""
    from thinwire.engine import Checkpoint
    from thinwire.errors import ConfigError
    from thinwire.hf.export import Wanted, export, export_adapter
    from thinwire.report import open_display

    if options.base and not options.adapter:
        raise ConfigError("--base has no effect without --adapter: a whole model needs no base")
    wanted = Wanted(
        options.folder,
        options.dtype,
        replace=options.force,
        verify=not options.no_verify,
        tokenizer=options.tokenizer,
        shard_bytes=int(options.shard_gb * 1e9),
    )
    with open_display(sys.stderr) as display:
        checkpoint = Checkpoint.open(options.checkpoint, options.allow_plugins)
        if options.adapter:
            export_adapter(checkpoint, wanted, options.base, display)
        else:
            export(checkpoint, wanted, display)
    print(f"wrote {options.folder}")
