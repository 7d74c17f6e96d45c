"""The sides of trainer.py, one a process: trainer_sides.py SIDE SETTINGS, its last line a JSON result."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM

from forge.actors.memory import keep_freed_memory
from forge.data_models import Completion
from forge.rl.collate import pack_completions
from forge.rl.loss import GRPOLoss

Settings = dict[str, Any]
Group = list[Completion]
Step = Callable[[], tuple[float, float]]  # -> loss, gradient norm
LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0


def main(side: str, settings: Settings) -> None:
    torch.set_num_threads(settings["threads"])
    keep_freed_memory()
    if side == "prepare":
        print(json.dumps(prepare(settings)))
        return
    batch = torch.load(settings["batch"], weights_only=False)
    make = plain_step if side == "plain" else forge_step
    groups, advantages = batch["groups"], batch["advantages"]
    if side == "unshared":
        groups = [[completion] for group in groups for completion in group]
    print(json.dumps(measure(make(settings, groups, advantages), settings)))


def measure(step: Step, settings: Settings) -> dict[str, Any]:
    """The first step is counted, not timed."""
    on_gpu = settings["device"] == "cuda"
    start = held_gb("VmRSS", on_gpu)
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    if on_gpu:  # kernels that are compiled in the step are not seen by the counter
        facts = [step()]
    else:
        with counter:
            facts = [step()]
    seconds, cpu_seconds = [], []
    for _ in range(settings["steps"]):
        began, cpu_began = time.perf_counter(), time.process_time()
        facts.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "start_gb": start,
        "peak_gb": held_gb("VmHWM", on_gpu),
        "flops": None if on_gpu else counter.get_total_flops(),
        "matmul_tflops": matmul_tflops(settings),
        "loss": [loss for loss, _ in facts],
        "grad_norm": [norm for _, norm in facts],
    }


def matmul_tflops(settings: Settings) -> float:
    """The best rate of a large square matrix product in the computing dtype."""
    on_gpu = settings["device"] == "cuda"
    size = 8192 if on_gpu else 1024
    a = torch.randn(size, size, device=settings["device"], dtype=getattr(torch, settings["dtype"]))
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        a @ a
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e12


def held_gb(line: str, on_gpu: bool) -> float:
    """Memory of this process now ("VmRSS") or at its peak ("VmHWM")."""
    if on_gpu:
        held = torch.cuda.memory_allocated() if line == "VmRSS" else torch.cuda.max_memory_allocated()
        return held / 1e9
    status = Path("/proc/self/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith(line)) / 1e6


def forge_step(settings: Settings, groups: list[Group], advantages: Tensor) -> Step:
    from forge.actors.trainer.hf_config import read_hf_config
    from forge.actors.trainer.learner import Learner
    from forge.actors.trainer.options import trainer_options
    from forge.actors.trainer.source import ModelSource

    folder = Path(settings["model"])
    options = trainer_options(
        settings["model"],
        optimizer={"lr": LEARNING_RATE},
        training={
            "seq_len": max(len(prompt_of(c)) + len(c.token_ids) for group in groups for c in group),
            "dtype": settings["dtype"],
            "max_grad_norm": MAX_GRAD_NORM,
            "gradient_accumulation_steps": settings["passes"],
        },
    )
    source = ModelSource(read_hf_config(folder), folder)
    learner = Learner(source, options, loss_of(settings), world_size=1, seed=0)
    inputs, targets = pack_completions(groups)
    targets = dataclasses.replace(targets, advantages=advantages, ref_logprobs=targets.generator_logprobs)

    def step() -> tuple[float, float]:
        result = learner.forward_backward([(inputs, targets)])
        return result.loss, learner.optim_step()["grad_norm"]

    return step


def plain_step(settings: Settings, groups: list[Group], advantages: Tensor) -> Step:
    """Prompts padded on the left, completions on the right to the longest of their pass; fused attention; the
    head at completion positions only (`logits_to_keep`); log-probabilities one sequence at a time, each from
    its logits by gather - logsumexp, as TRL does it; no entropies; fused AdamW."""
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    model = plain_model(settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    loss_function = loss_of(settings)
    completions = [completion for group in groups for completion in group]
    order = torch.arange(len(completions)).tensor_split(settings["passes"])
    passes = [(padded([completions[i] for i in part], device), advantages[part].to(device)) for part in order]

    def step() -> tuple[float, float]:
        total = 0.0
        for rows, part_advantages in passes:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = plain_logits(model, rows)
            logprobs = plain_logprobs(logits, rows["targets"])
            entropies = torch.zeros_like(logprobs)
            loss, _ = loss_function.from_logprobs(
                logprobs, entropies, part_advantages, rows["logprobs"], rows["mask"], rows["logprobs"]
            )
            weighted = loss * len(logprobs) / len(completions)
            weighted.backward()
            total += weighted.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm.item()

    return step


def plain_model(settings: Settings) -> Any:
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    return model.to(settings["device"])


def padded(completions: Group, device: torch.device) -> dict[str, Tensor]:
    prompt = max(len(prompt_of(c)) for c in completions)
    length = max(len(c.token_ids) for c in completions)
    ids = torch.zeros(len(completions), prompt + length, dtype=torch.long)
    real = torch.zeros_like(ids)
    logprobs = torch.zeros(len(completions), length)
    for row, c in enumerate(completions):
        whole = torch.cat([prompt_of(c), c.token_ids])
        columns = slice(prompt - len(prompt_of(c)), prompt + len(c.token_ids))
        ids[row, columns], real[row, columns] = whole, 1
        logprobs[row, : len(c.token_ids)] = c.logprobs
    rows = {
        "ids": ids,
        "real": real,
        "positions": (real.cumsum(-1) - 1).clamp(min=0),
        "targets": ids[:, prompt:],
        "mask": real[:, prompt:].bool(),
        "logprobs": logprobs,
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def plain_logits(model: Any, rows: dict[str, Tensor]) -> Tensor:
    """[N, T, V], each predicting a token of the completions."""
    output = model(
        input_ids=rows["ids"],
        attention_mask=rows["real"],
        position_ids=rows["positions"],
        logits_to_keep=rows["targets"].shape[1] + 1,
        use_cache=False,
    )
    return output.logits[:, :-1]


def plain_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    found = []
    for row, ids in zip(logits, targets, strict=True):
        row = row.float()
        found.append(row.gather(-1, ids[:, None])[:, 0] - row.logsumexp(-1))
    return torch.stack(found)


def loss_of(settings: Settings) -> GRPOLoss:
    return GRPOLoss(beta=0.02, horizon=settings["longest_completion"])


def prompt_of(completion: Completion) -> Tensor:
    assert completion.prompt_ids is not None
    return completion.prompt_ids


@torch.no_grad()
def prepare(settings: Settings) -> dict[str, Any]:
    """Writes the batch, sampled at random, with the model's own log-probabilities as the generator's."""
    if settings["shape"] is not None and not Path(settings["model"]).exists():
        write_random_model(settings["shape"], Path(settings["model"]))
    model = plain_model(settings).eval()
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    groups: list[Group] = []
    for i in range(settings["groups"]):
        prompt = torch.randint(0, vocab, (prompt_length(settings, i),), generator=generator)
        longest = settings["longest_completion"]
        lengths = torch.randint(min(8, longest), longest + 1, (settings["samples"],), generator=generator)
        lengths[0] = longest  # so that every step pads to the same length
        groups.append([])
        for length in lengths.tolist():
            ids = torch.randint(0, vocab, (length,), generator=generator)
            completion = Completion("", ids, torch.zeros(length), prompt_ids=prompt, temperature=1.0)
            rows = padded([completion], model.device)
            found = plain_logprobs(plain_logits(model, rows), rows["targets"])[0].cpu()
            groups[-1].append(dataclasses.replace(completion, logprobs=found))
    advantages = torch.randn(settings["groups"] * settings["samples"], generator=generator)
    torch.save({"groups": groups, "advantages": advantages}, settings["batch"])
    return amount_of(model.config, groups)


def prompt_length(settings: Settings, i: int) -> int:
    if settings["prompts"] != "mixed":
        return int(settings["prompts"])
    return 48 + (200 - 48) * i // max(1, settings["groups"] - 1)


def write_random_model(shape: str, folder: Path) -> None:
    from forge.actors.trainer.flavors import REGISTRIES, flavor_config

    name, _, wanted = shape.partition("-")
    flavor = next((f for f in REGISTRIES[name][0] if f.lower() == wanted.lower()), wanted)
    config = flavor_config(name, flavor)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def amount_of(config: AutoConfig, groups: list[Group]) -> dict[str, Any]:
    """Tokens of the batch, and the fewest FLOPs of matrix products that its gradients can cost.

    A product of [m, k] and [k, n] costs 2 m k n, and twice that again for its two gradients. Every token of a
    prompt, and of a completion but its last, goes through the layers once and attends to what it sees only;
    the head is computed where a completion's token is predicted, once for the prompt's last token.
    """
    c: Any = config
    heads = c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // heads
    layer = (
        c.hidden_size * size * 2 * (heads + c.num_key_value_heads) + 3 * c.hidden_size * c.intermediate_size
    )
    tokens = sources = pairs = texts = 0
    for group in groups:
        prompt = len(prompt_of(group[0]))
        lengths = [len(completion.token_ids) for completion in group]
        tokens += prompt + sum(n - 1 for n in lengths)
        sources += 1 + sum(n - 1 for n in lengths)
        pairs += prompt * (prompt + 1) // 2 + sum((n - 1) * prompt + (n - 1) * n // 2 for n in lengths)
        texts += sum(prompt + n for n in lengths)
    flops = 6 * c.num_hidden_layers * (layer * tokens + 2 * heads * size * pairs)
    flops += 6 * c.hidden_size * c.vocab_size * sources
    return {"tokens": texts, "tokens_of_tree": tokens, "fewest_tflop": flops / 1e12}


CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_shape=None, **__: (
        sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, out_shape=None, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
"""What the counter lacks; masked pairs count as they do for every other attention."""


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
