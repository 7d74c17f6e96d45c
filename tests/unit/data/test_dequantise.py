"""A GGUF file against the model it was written from."""

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.data.dequantise import dequantise
from forge.errors import AssetError
from tests.unit.data.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def made(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dequantised")
    dequantise(write_tiny_gguf(folder / "tiny.gguf", tiny_llama, pre="gpt-2"), folder)
    return folder


def test_weights_are_the_original_ones_up_to_8_bits(made: Path, tiny_llama: Path) -> None:
    written, original = load_file(made / "model.safetensors"), load_file(tiny_llama / "model.safetensors")
    assert written.keys() == original.keys()
    for name, weight in original.items():
        assert written[name].dtype == torch.bfloat16
        # Q8_0 keeps each block of 32 weights within half a step of max / 127; bfloat16 rounds by 1 / 256.
        bound = weight.abs().max() / 254 + weight.abs() / 256 + 1e-6
        assert bool(((written[name].float() - weight).abs() <= bound).all()), name


def test_weights_are_those_that_the_gguf_library_reads(made: Path) -> None:
    written = load_file(made / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made / "tiny.gguf").tensors}
    for theirs, ours in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
    ]:
        read = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert torch.equal(written[ours], torch.tensor(read).to(torch.bfloat16))


def test_the_model_speaks_like_the_original(made: Path, tiny_llama: Path) -> None:
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        logits = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (made, tiny_llama)
        ]
    difference = (logits[0].log_softmax(-1) - logits[1].log_softmax(-1)).abs().mean()
    assert difference < 0.05  # 1.1 where the query heads are left in the file's order


def test_config_generation_config_and_tokenizer_agree(made: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert not hasattr(model.config, "quantization_config")


def test_the_tokenizer_is_the_original_one(made: Path, tiny_llama: Path) -> None:
    written, original = AutoTokenizer.from_pretrained(made), AutoTokenizer.from_pretrained(tiny_llama)
    assert written.chat_template == original.chat_template
    for text in ["What is 3 + 4?", "<|im_start|>user\nhéllo<|im_end|>", "a  b\n\n c"]:
        assert written(text).input_ids == original(text).input_ids
        assert written.decode(written(text).input_ids) == text


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["ĠĠ", "1", "2"]), ("gpt-2", ["Ġ", "Ġ12"])])
def test_digits_are_split_where_the_file_says_so(
    tiny_llama: Path, tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    dequantise(write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama, pre=pre), tmp_path)
    split = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.pre_tokenizer.pre_tokenize_str("  12")
    assert [piece for piece, _ in split] == pieces


def test_a_file_that_lacks_a_tensor_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama, without="down_proj")
    with pytest.raises(AssetError, match=r"missing_keys .*mlp\.down_proj"):
        dequantise(file, tmp_path)


def test_a_file_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "oddity")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(AssetError, match=r"can't read the GGUF file .*odd\.gguf") as caught:
        dequantise(tmp_path / "odd.gguf", tmp_path)
    assert "\n" not in str(caught.value)
