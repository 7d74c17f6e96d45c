"""Tiny random models with a real tokenizer and chat template, made in a second and read by every part."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with 512 entries: any text encodes and decodes exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    corpus = [f"What is {a} + {b}? {a} + {b} = {a + b}. The answer is" for a in range(30) for b in range(30)]
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def make_tiny_model(
    folder: Path, family: str = "llama", tied: bool = True, seed: int = 0, **overrides: object
) -> Path:
    """Saves a 2-layer model (hidden 64, head size 32, vocabulary 512, fp32) with its tokenizer."""
    config_class, model_class = FAMILIES[family]
    shape = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "intermediate_size": 128,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, **overrides}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.to(torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
