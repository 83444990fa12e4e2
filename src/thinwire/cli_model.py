"""The commands that open a checkpoint, or make one: loss, text, an endpoint, models of others."""

import argparse
import functools
import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.arguments import AddCommand, add_device, add_plugins, add_value, number
from thinwire.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run: --help stays quick
    from thinwire.inference import Model


def add_model_commands(add: AddCommand) -> None:
    """Put `eval`, `generate`, `serve`, `import` and `export` on the command line."""
    sub = add("eval", eval_command, "compute a checkpoint's validation loss")
    _add_checkpoint(sub)
    about = "validation microbatches; 0 = as in training, or all of --data"
    add_value(sub, "--batches", number(int, 0), about, 0)
    sub.add_argument("--data", type=Path, metavar="PATH", help="file or folder of text to score")
    add_value(sub, "--text-key", str, "with --data: key or column that holds the text", "text")
    sub.add_argument("--json", action="store_true", help="print JSON")

    about = "run these tasks of the lm-eval harness instead, on a checkpoint or an exported model"
    sub.add_argument("--lm-eval", metavar="TASK[,TASK]", help=about)
    add_value(sub, "--limit", number(int, 0), "with --lm-eval: examples of each task; 0 = all", 0)
    about = "with --lm-eval: folder with task files of your own"
    sub.add_argument("--tasks-folder", type=Path, help=about)

    sub = add("generate", generate_command, "generate text from a checkpoint")
    _add_checkpoint(sub)
    about = "text to continue (default: 'def '), or with --chat the only message"
    sub.add_argument("--prompt", help=about)
    about = "hold a conversation, by the chat template of the model"
    sub.add_argument("--chat", action="store_true", help=about)
    sub.add_argument("--system", default="", help="with --chat: what the model is told first")
    _add_template(sub)
    add_value(sub, "--tokens", number(int, 1), "tokens to generate", 64)
    add_value(sub, "--temperature", number(float, 0), "sampling temperature; 0 = greedy", 0.8)
    add_value(sub, "--top-k", number(int, 0), "sample from the K likeliest tokens; 0 = all", 40)
    about = "sample from the likeliest tokens that make up this probability; 1 = all"
    add_value(sub, "--top-p", number(float, above=0, most=1), about, 1.0)
    add_value(sub, "--seed", number(int), "seed of the sampling", 0)

    sub = add("serve", serve_command, "answer requests for text over HTTP, as OpenAI's servers do")
    _add_checkpoint(sub)
    add_value(sub, "--listen", str, "address to listen on", "127.0.0.1")
    add_value(sub, "--port", number(int, 0, most=65535), "port; 0 = any free one", 8000)
    about = "most tokens that a request may ask for; 0 = the model's context"
    add_value(sub, "--max-tokens", number(int, 0), about, 0)
    about = "texts under way at a time, which take turns token by token"
    add_value(sub, "--parallel", number(int, 1, most=32), about, 1)
    about = "requests that wait for their turn; more get status 429"
    add_value(sub, "--queue", number(int, 0, most=128), about, 16)
    _add_template(sub)

    sub = add("import", import_command, "make a checkpoint of a Hugging Face or GGUF model")
    about = "a folder with config.json and safetensors, a .gguf file, or a name on the hub"
    sub.add_argument("model", metavar="DIR_OR_NAME", help=about)
    about = "folder to write, as models/NAME"
    sub.add_argument("--to", type=Path, required=True, metavar="FOLDER", help=about)
    add_value(sub, "--stages", number(int, 1), "number of pipeline stages", 4)
    about = "tokens per sequence; 0 = as many as the model can see, at most 2048"
    add_value(sub, "--context", number(int, 0), about, 0)
    sub.add_argument("--force", action="store_true", help="replace an earlier import")

    sub = add("export", export_command, "write a checkpoint as a Hugging Face model folder")
    sub.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder (its newest)")
    sub.add_argument("--to", choices=("hf",), default="hf", help="format (default: hf)")
    sub.add_argument("folder", type=Path, help="folder to write")
    about = "type of the weights: as trained, or rounded to half the size (default: fp32)"
    sub.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help=about)
    add_value(sub, "--shard-gb", number(float, above=0), "most GB of one weight file", 5.0)
    about = "tokenizer.json, or the folder of one, for a run that was trained without"
    sub.add_argument("--tokenizer", type=Path, help=about)
    about = "of a LoRA run: write the adapters alone, as a folder that peft opens"
    sub.add_argument("--adapter", action="store_true", help=about)
    about = "with --adapter: the model that they belong to, a folder or a name on the hub"
    sub.add_argument("--base", default="", metavar="NAME", help=about)
    sub.add_argument("--force", action="store_true", help="replace a model that is there already")
    about = "do not open the result with transformers to compare it with the trained model"
    sub.add_argument("--no-verify", action="store_true", help=about)
    add_plugins(sub)


def _add_checkpoint(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder (its newest)")
    about = "apply the run's codecs at its cuts (default: on)"
    sub.add_argument("--compression", default="on", choices=("on", "off"), help=about)
    add_plugins(sub)
    add_device(sub)


def _add_template(sub: argparse.ArgumentParser) -> None:
    about = "chat template, a Jinja file (default: the model's own, or chatml)"
    sub.add_argument("--template", default="", metavar="FILE", help=about)


def eval_command(options: argparse.Namespace) -> None:
    """Print a checkpoint's validation loss, its loss on other text, or scores of benchmarks."""
    from thinwire.report import open_display

    if options.lm_eval is not None:
        _eval_tasks(options)
        return
    if options.limit or options.tasks_folder:
        raise ConfigError("--limit and --tasks-folder are about the tasks of --lm-eval: name some")

    with open_display(sys.stderr) as display:
        model = _open_model(options)
        if options.data is None:
            result = model.evaluate(display, options.batches)
        else:
            result = model.evaluate_text(options.data, display, options.batches, options.text_key)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    bits = f", {result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else ""
    what = f"loss on {options.data}" if options.data else "validation loss"
    loss = f"{result['valid_loss']:.4f} (perplexity {result['perplexity']:.1f}{bits})"
    over = f"{result['tokens']:,} tokens, compression {result['compression']}"
    print(f"{result['checkpoint']}: {what} {loss} over {over}")


def _eval_tasks(options: argparse.Namespace) -> None:
    tasks = [task.strip() for task in options.lm_eval.split(",") if task.strip()]
    if not tasks:
        raise ConfigError("--lm-eval needs the name of a task, such as hellaswag")
    if options.data is not None or options.batches:
        raise ConfigError("--lm-eval has data of its own: leave out --data and --batches")

    from thinwire.hf.export import run_tasks, scores_text
    from thinwire.report import PlainDisplay

    how = options.device, options.limit, options.tasks_folder, options.allow_plugins
    results = run_tasks(options.checkpoint, tasks, PlainDisplay(sys.stderr), *how)
    print(json.dumps(results, indent=1) if options.json else scores_text(results))


def generate_command(options: argparse.Namespace) -> None:
    """Print a continuation of the prompt, or hold a conversation."""
    from thinwire.inference import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    for name in ("template", "system"):
        if getattr(options, name) and not options.chat:
            raise ConfigError(f"--{name} is about the conversation of --chat: add that, too")
    model = _writing_model(options)
    if options.chat:
        # Answer each line of the input until it ends, or the one prompt.
        messages = [{"role": "system", "content": options.system}] if options.system else []
        for line in [options.prompt] if options.prompt is not None else _typed_lines():
            messages.append({"role": "user", "content": line})
            said = _shown(model.answer(messages, options.tokens, sampling))
            messages.append({"role": "assistant", "content": said})
        return
    prompt = "def " if options.prompt is None else options.prompt
    ids = model.encode(prompt)
    if len(ids) > (most := model.settings.model.context):
        note = f"note: the prompt has {len(ids)} tokens, the model sees the last {most}"
        print(note, file=sys.stderr)
    _shown(itertools.chain([prompt], model.write(ids, options.tokens, sampling)))


def _typed_lines() -> Iterator[str]:
    """What is typed, line by line; a sign asks for it where a person sits."""
    sign = "> " if sys.stdin.isatty() else ""
    print(sign, end="", flush=True)
    while line := sys.stdin.readline():
        if line.strip():
            yield line.strip()
        print(sign, end="", flush=True)


def _shown(pieces: Iterable[str]) -> str:
    """Print a text as it comes; returns it."""
    said = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        said += piece
    print()
    return said


def serve_command(options: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    from thinwire.inference.serve import Endpoint, run_server

    limits = options.max_tokens, options.parallel, options.queue
    endpoint = Endpoint(_writing_model(options), *limits)
    run_server(endpoint, options.listen, options.port, sys.stdout)


def _writing_model(options: argparse.Namespace) -> "Model":
    """The model of a command that writes text, with what is to be known of it said."""
    model = _open_model(options)
    model.template = options.template
    for note in model.notes():
        print(f"note: {note}", file=sys.stderr)
    return model


def _open_model(options: argparse.Namespace) -> "Model":
    from thinwire.inference import Model

    is_on = options.compression == "on"
    return Model(options.checkpoint, options.device, is_on, allow_plugins=options.allow_plugins)


def import_command(options: argparse.Namespace) -> None:
    """Import a model, and say what became of it and what comes next."""
    from thinwire.hf.importer import import_model
    from thinwire.paths import expanded
    from thinwire.report import open_display

    target, how = expanded(options.to, "--to"), (options.stages, options.context, options.force)
    with open_display(sys.stderr) as display:
        told = functools.partial(display.progress, "import", unit="B")
        lines = import_model(options.model, target, *how, told)
    print(*lines, sep="\n")
    folder, settings = shlex.quote(str(target)), shlex.quote(str(target / "run.toml"))
    print(f"next: thinwire generate {folder}, thinwire train {settings}")


def export_command(options: argparse.Namespace) -> None:
    """Export a checkpoint, and say how it can be opened."""
    from thinwire.engine.checkpoint import Checkpoint
    from thinwire.hf.export import Wanted, export, export_adapter
    from thinwire.report import open_display

    if options.base and not options.adapter:
        raise ConfigError("--base has no effect without --adapter: a whole model needs no base")
    files = options.tokenizer, int(options.shard_gb * 1e9)
    wanted = Wanted(options.folder, options.dtype, options.force, not options.no_verify, *files)
    with open_display(sys.stderr) as display:
        checkpoint = Checkpoint.open(options.checkpoint, options.allow_plugins)
        if options.adapter:
            export_adapter(checkpoint, wanted, options.base, display)
        else:
            export(checkpoint, wanted, display)
    print(f"wrote {options.folder}")
