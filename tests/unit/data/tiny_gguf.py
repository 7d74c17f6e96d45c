"""A tiny Llama written as a GGUF file, in the layout that llama.cpp's converter gives it."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.tiny import make_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def write_tiny_gguf(file: Path, model: Path, *, pre: str = "smollm", without: str | None = None) -> Path:
    """Writes the tiny llama of `tests.tiny` as GGUF, matrices in 8 bits; `without` the tensors so named."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(512)
    _add_tokenizer(writer, pre)
    for name, weight in load_file(model / "model.safetensors").items():
        if without is None or without not in name:
            _add_tensor(writer, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    tokenizer = make_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + [f"unused{i}" for i in range(512 - len(vocabulary))]
    control = set(tokenizer.all_special_tokens) | {"<|im_start|>"}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in control else kinds.NORMAL for token in tokens])
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray) -> None:
    if "q_proj" in name:
        weight = _interleave(weight, HEADS)
    if "k_proj" in name:
        weight = _interleave(weight, KV_HEADS)
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    if weight.ndim == 1:
        writer.add_tensor(name, weight)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a rotary head: first and second half interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
