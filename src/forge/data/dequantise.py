"""[1] A GGUF file rewritten as a Hugging Face folder in bfloat16."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import AssetError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Vocabularies learnt with every digit on its own (llama.cpp's names, from `tokenizer.ggml.pre`). transformers
# reads these files without that rule and then splits white space before digits as the model never saw it.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def dequantise(gguf: Path, folder: Path) -> None:
    """Writes safetensors (bfloat16), config, generation config and tokenizer of a GGUF file into a folder.

    The end, begin and pad tokens are the tokenizer's in all of them. Raises AssetError when the file can't be
    read or does not hold the whole model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
    except (ValueError, KeyError, NotImplementedError, OSError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise AssetError(f"can't read the GGUF file {gguf} ({type(error).__name__}: {reason})") from error
    model, loading = loaded
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if loading[problem]:
            raise AssetError(
                f"the GGUF file {gguf} does not fit its config: {problem} {sorted(loading[problem])[:3]}"
            )

    _split_digits(tokenizer.backend_tokenizer, gguf)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: "Tokenizer", gguf: Path) -> None:
    """Gives the tokenizer the digit rule of its file, where transformers leaves it out."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
