"""A GGUF file, written with the library of that format, becomes the model that it was made from."""

import gguf
import numpy as np
import pytest
import torch
from their_models import make_folder, tokenizer

from thinwire.errors import ConfigError
from thinwire.hf.importer import import_model, opened
from thinwire.inference import Model

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down"}  # fmt: skip


def write_gguf(path, model, extra=""):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = tokenizer()._backend.get_vocab()
    writer.add_token_list(sorted(tokens, key=tokens.__getitem__))
    writer.add_token_merges(["d e"])
    writer.add_eos_token_id(0)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(theirs(name), turned(name, tensor, config))
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs(name):
    inner, weight = name.rsplit(".", 1)
    parts = inner.split(".", 3)
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{NAMES[parts[3]]}.{weight}"
    return f"{NAMES[inner]}.{weight}"


def turned(name, tensor, config):
    """The format keeps the two channels of a rotation side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return tensor.numpy()
    rows, columns = tensor.shape
    split = tensor.view(count, 2, rows // count // 2, columns)
    return split.transpose(1, 2).reshape(rows, columns).contiguous().numpy()


def test_a_gguf_file_is_the_model_that_it_was_made_from(tmp_path):
    model = make_folder(tmp_path / "theirs", "llama")
    write_gguf(tmp_path / "small.gguf", model)
    target = tmp_path / "ours"
    said = import_model(str(tmp_path / "small.gguf"), target, 2)
    assert any("dequantised" in line for line in said)
    ids = torch.randint(290, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, expected = Model(target, "cpu")(ids), model(ids).logits
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    # Scaled positions, which transformers would drop, are refused.
    write_gguf(tmp_path / "scaled.gguf", model, extra="rope_freqs.weight")
    words = r"scaled rotary positions \(rope_freqs.weight\)"
    with pytest.raises(ConfigError, match=words), opened(str(tmp_path / "scaled.gguf")):
        pass
