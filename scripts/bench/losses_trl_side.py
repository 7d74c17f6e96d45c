"""TRL's half of losses_vs_trl, in TRL's own environment: its trainers' code on given batches.

    python losses_trl_side.py FOLDER
reads FOLDER/work.pt, writes FOLDER/trl.pt. Nothing of TRL's maths is written again here: real trainers are
made, whose model gives the logits it is told (a table in place of the layers, the identity as its head), and
whose generation gives the completions, log-probabilities and rewards it is told. Batches, rewards and
advantages, importance ratios and losses are computed by TRL.
"""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

Batch = dict[str, Any]
Result = dict[str, Tensor]

PROMPT = "t3"  # one token


class Table:
    """Stands in for a model's layers: their output is what it is told; the head is the identity, so that
    these are the logits."""

    def __init__(self, model: Any) -> None:
        self.states: Tensor | None = None
        model.model.forward = self

    def show(self, logits: Tensor) -> None:
        """logits [N, T, V] of the completions: they stand one place before the tokens they predict."""
        nothing = logits.new_zeros(len(logits), 1, logits.shape[-1])
        self.states = torch.cat([logits, nothing], dim=1)

    def __call__(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.states)


def main(folder: Path) -> None:
    work = torch.load(folder / "work.pt")
    save_model(folder / "model", work["vocab_size"])
    compute = {"grpo": grpo, "rloo": rloo, "sft": sft, "ops": ops}
    results: dict[str, list[Result]] = {}
    for case in work["cases"]:
        batches = work["batches"][case["batch"]]
        results[case["name"]] = compute[case["side"]](case["trl"], batches, folder)
    torch.save(results, folder / "trl.pt")


def save_model(folder: Path, vocab_size: int) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(vocab_size))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t2"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2"
    ).save_pretrained(folder)


def grpo(settings: dict[str, Any], batches: list[Batch], folder: Path) -> list[Result]:
    trainer, tables, current = make(GRPOTrainer, GRPOConfig, settings, batches[0], folder)
    # vLLM itself is not started: what it would have sampled is told by `_generate`.
    trainer.use_vllm = settings.get("vllm_importance_sampling_correction", False)

    def generate(_: Any) -> tuple[Any, ...]:
        batch = current["batch"]
        masks = ragged(batch["loss_mask"].long(), batch)
        logprobs = ragged(batch["generator_logprobs"], batch)
        sampled = logprobs if trainer.use_vllm else None
        ids = ragged(batch["ids"], batch)
        return [[3]] * len(ids), ids, masks, [""] * len(ids), sampled, {}, None, None

    trainer._generate = generate
    return [losses(trainer, tables, current, batch) for batch in batches]


def rloo(settings: dict[str, Any], batches: list[Batch], folder: Path) -> list[Result]:
    trainer, tables, current = make(RLOOTrainer, RLOOConfig, settings, batches[0], folder)

    def generate(_: Any) -> tuple[Any, ...]:
        ids = ragged(current["batch"]["ids"], current["batch"])
        return [[3]] * len(ids), ids, [""] * len(ids)

    trainer._generate = generate
    return [losses(trainer, tables, current, batch) for batch in batches]


def make(
    trainer_class: type, config_class: type, settings: dict[str, Any], batch: Batch, folder: Path
) -> Any:
    """A trainer of TRL's with `settings`; the tables of its models; and what its reward looks at."""
    current: dict[str, Batch] = {}

    def reward(**_: Any) -> list[float]:
        return current["batch"]["rewards"].tolist()

    num_sequences, length = batch["ids"].shape
    config = config_class(
        output_dir=str(folder / "out"),
        use_cpu=True,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=num_sequences,
        num_generations=batch["group_size"],
        max_completion_length=length,
        num_iterations=2,  # so that the policy that sampled is not taken for the present one
        **settings,
    )
    rows = Dataset.from_dict({"prompt": [PROMPT] * num_sequences})
    trainer = trainer_class(model=str(folder / "model"), reward_funcs=reward, args=config, train_dataset=rows)
    trainer.current_gradient_accumulation_steps = 1  # which the training loop sets
    trainer.model.train()
    tables = {"policy": Table(trainer.model)}
    if trainer.ref_model is not None:
        tables["reference"] = Table(trainer.ref_model)
    return trainer, tables, current


def losses(trainer: Any, tables: dict[str, Table], current: dict[str, Batch], batch: Batch) -> Result:
    current["batch"] = batch
    tables["policy"].show(batch["old_logits"])
    if "reference" in tables:
        tables["reference"].show(batch["ref_logits"])
    rows = [{"prompt": PROMPT}] * len(batch["ids"])
    inputs = trainer._generate_and_score_completions(rows)
    advantages = inputs["advantages"]
    inputs["advantages"] = batch["advantages"]
    logits = batch["logits"].clone().requires_grad_()
    tables["policy"].show(logits)
    value = trainer._compute_loss(trainer.model, inputs)
    [gradient] = torch.autograd.grad(value, logits)
    return {"value": value.detach(), "gradient": gradient, "advantages": advantages}


def sft(settings: dict[str, Any], batches: list[Batch], folder: Path) -> list[Result]:
    config = SFTConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )
    rows = Dataset.from_dict({"input_ids": [[3, 4]]})
    trainer = SFTTrainer(model=str(folder / "model"), args=config, train_dataset=rows)
    trainer.model.train()
    table = Table(trainer.model)
    results = []
    for batch in batches:
        logits = batch["logits"].clone().requires_grad_()
        table.show(logits)
        prompt = torch.full((len(logits), 1), 3)
        ids = torch.cat([prompt, batch["ids"]], dim=1)
        labels = torch.cat([prompt * 0 - 100, batch["ids"].masked_fill(~batch["loss_mask"], -100)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        value = trainer.compute_loss(trainer.model, inputs)
        [gradient] = torch.autograd.grad(value, logits)
        results.append({"value": value.detach(), "gradient": gradient})
    return results


def ops(settings: dict[str, Any], batches: list[Batch], _: Path) -> list[Result]:
    results = []
    for batch in batches:
        logits = batch["logits"].clone().requires_grad_()
        if settings["op"] == "entropy":
            value = entropy_from_logits(logits)
        else:
            value = selective_log_softmax(logits, batch["ids"], temperature=settings["temperature"])
        [gradient] = torch.autograd.grad((value * batch["old_logprobs"]).sum(), logits)
        results.append({"value": value.detach(), "gradient": gradient})
    return results


def ragged(values: Tensor, batch: Batch) -> list[list[Any]]:
    """Rows [N, T] as lists that end where their completion does."""
    lengths = batch["lengths"].tolist()
    return [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]))
