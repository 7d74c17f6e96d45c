"""Prompts as the model's chat template makes them."""

import shutil
from pathlib import Path

import pytest

from forge.data.tokenizer import load_tokenizer, render_prompt
from forge.errors import AssetError

# Like SmolLM2's and Qwen2.5's: a system message of its own where none is given.
WITH_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Tiny<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}user:"
USER = "<|im_start|>user\n3 + 4<|im_end|>\n<|im_start|>assistant\n"


def test_a_question_becomes_a_user_message_and_the_assistants_turn(tiny_llama: Path) -> None:
    assert render_prompt(load_tokenizer(tiny_llama), "3 + 4") == USER


def test_a_system_prompt_stands_first(tiny_llama: Path) -> None:
    prompt = render_prompt(load_tokenizer(tiny_llama), "3 + 4", "Be brief.")
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n" + USER


def test_no_system_prompt_leaves_it_to_the_template_and_an_empty_one_does_not(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.chat_template = WITH_DEFAULT
    assert render_prompt(tokenizer, "3 + 4") == "<|im_start|>system\nYou are Tiny<|im_end|>\n" + USER
    assert render_prompt(tokenizer, "3 + 4", "") == "<|im_start|>system\n<|im_end|>\n" + USER


def test_a_tokenizer_without_a_chat_template_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "base_model"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(AssetError, match=r"base_model has no chat template.*instruct model") as caught:
        render_prompt(load_tokenizer(folder), "3 + 4")
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_the_system_prompt_is_named(tiny_llama: Path) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.chat_template = NO_SYSTEM
    assert render_prompt(tokenizer, "3 + 4") == "user:"
    with pytest.raises(AssetError, match=r"refuses the messages \(no system role\)"):
        render_prompt(tokenizer, "3 + 4", "Be brief.")


def test_a_folder_without_a_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(AssetError, match="no tokenizer that loads") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssetError, match="no model at ./nowhere"):
        load_tokenizer("./nowhere")
