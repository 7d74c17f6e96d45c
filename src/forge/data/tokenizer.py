"""[1] The model's tokenizer, and a question rendered as the prompt the model was trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge.data.assets import fetch
from forge.errors import AssetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model: a folder or any other form that `fetch` takes. Raises AssetError."""
    from transformers import AutoTokenizer

    folder = Path(model) if Path(model).is_dir() else fetch(model)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise AssetError(
            f"model folder {folder} has no tokenizer that loads ({type(error).__name__}: {reason}): "
            "save one there with tokenizer.save_pretrained"
        ) from error


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase", question: str, system_prompt: str | None = None
) -> str:
    """The question as a user's message, up to where the assistant begins to answer.

    system_prompt None sends no system message, and many templates then insert their own (SmolLM2: "You are a
    helpful AI assistant named SmolLM, trained by Hugging Face"); "" sends an empty one, the shortest prompt
    those templates can make. Every token of the prompt costs time in generation and training.

    The text already holds the template's begin token, so tokenize it with `add_special_tokens=False`.
    Raises AssetError when the tokenizer has no chat template (a base model), or it refuses the messages.
    """
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return render_chat(
        tokenizer, [*messages, {"role": "user", "content": question}], add_generation_prompt=True
    )


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[dict[str, str]],
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Messages as the model's chat template writes them; raises AssetError as `render_prompt` does."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise AssetError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, as base models have none: "
            "use the instruct model, or put a chat_template.jinja into the folder"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )
    except TemplateError as error:
        raise AssetError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages ({error}): "
            "if it knows no system prompt, leave dataset.system_prompt out"
        ) from error
