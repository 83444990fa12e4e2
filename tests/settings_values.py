"""Settings and text for tests: plain values with single keys changed."""

from typing import Any

from thinwire.settings import Settings

TINY_MODEL = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 300,
              "context": 16}  # fmt: skip

EXACT = {"run__precision": "fp32", "codec__forward": "fp32", "codec__backward": "fp32"}


def narrow(mode, **changes):
    """A boundary of six dimensions; other keys of its section."""
    own = {"mode": mode, "rank": 6, **changes}
    return {f"boundary__{key}": value for key, value in own.items()}


def write_texts(folder):
    """Small distinct documents, made from a counter."""
    words = ["stage", "link", "frame", "codec", "meter", "window", "step", "loss", "token", "wire"]
    for number in range(40):
        lines = [
            " ".join(words[(number * 7 + line * 3 + i * i) % len(words)] for i in range(9))
            for line in range(20)
        ]
        (folder / f"doc-{number:02d}.txt").write_text(f"document {number}\n" + "\n".join(lines))
    return folder


def tiny_settings(out, text_folder, changes):
    """Settings of a tiny exact run; `section__key=value` changes one key."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "out": str(out), "device": "cpu", "precision": "fp64",
                "threads": 1},
        "model": dict(TINY_MODEL),
        "data": {"source": "text", "path": str(text_folder), "valid_fraction": 0.1},
        "pipeline": {"stages": 2, "microbatches": 4},
        "link": {"emulate": False},
        "codec": {"forward": "fp64", "backward": "fp64"},
        "optim": {"lr": 1e-2, "warmup": 2, "clip": 0.5},
        "train": {"steps": 4, "batch": 8, "eval_every": 2, "eval_batches": 2,
                  "checkpoint_every": 0},
    }  # fmt: skip
    for place, value in changes.items():
        section, key = place.split("__")
        values.setdefault(section, {})[key] = value
    return Settings.from_plain(values)
