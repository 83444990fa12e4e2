"""Tiny random models of transformers, saved as people save them."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from thinwire.data import Tokenizer

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "initializer_range": 0.3}  # fmt: skip
STRETCHED = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "tied": {"tie_word_embeddings": True},
                                    "all heads": {"num_key_value_heads": 4},
                                    "llama3": {"rope_parameters": STRETCHED, "head_dim": 12},
                                    "qwen2": {}, "qwen3": {"head_dim": 16}}  # fmt: skip


@functools.cache
def tokenizer():
    """One with 300 entries."""
    text = "def main(): return 'a text of several words, and more of them'\n" * 9
    return Tokenizer.train([f"{text} {number}" for number in range(200)], 300)


def make_folder(folder, kind, dtype=torch.float32, **options):
    """Save a model of this kind there; returns it."""
    named = kind if kind.startswith("qwen") else "llama"
    config = AutoConfig.for_model(named, **{**SIZES, **KINDS[kind]})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder, **options)
    tokenizer().save(folder / "tokenizer.json")
    return model


@functools.cache
def saved(kind):
    """A folder to read from and to copy, made once."""
    scratch = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    make_folder(scratch / kind, kind)
    return scratch / kind
