"""The ranks of a trainer, processes of their own: python -m tests.integration.trainer_worker OUT PLANS.

They are forked from one that has imported everything, the slow part.
"""

import asyncio
import dataclasses
import importlib
import json
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from forge.actors.reference_model import ReferenceModel
from forge.actors.trainer import TitanTrainer, gathering
from forge.actors.trainer.agreement import from_rank_0
from forge.data_models import Completion, TextTrainBatch, TrainInputs, TrainTargets
from forge.errors import ForgeError, NotFinite
from forge.rl.loss import PPOLoss
from forge.rl.loss.correction import OffPolicyCorrection
from forge.weights.part import Piece, plan_pieces
from tests.integration.loss_cases import losses, own_loss, with_extras, without_proximal
from tests.integration.plain_training import MAX_GRAD_NORM, OPTIMIZER, SCHEDULE, STEPS
from tests.integration.trainer_cases import (
    MeanOverTokens,
    Result,
    WeightedLogprobs,
    batch_of,
    completion_groups,
)

# completions of each prompt, for up to four data-parallel ranks; nothing is learnt of the prompt MASKED
LENGTHS = ((3, 7, 1), (5,), (2, 9), (4, 4), (6,), (1, 2, 8), (3,), (5, 5))
MASKED = 4
PROBE = [7, 300, 41, 9, 128]  # tokens to be scored
Batch = tuple[list[TrainInputs], list[TrainTargets]] | tuple[list[TextTrainBatch], None]


def all_groups() -> list[list[Completion]]:
    """The whole batch: the same for every plan."""
    return completion_groups(lengths=LENGTHS)


def advantages_of(groups: list[list[Completion]]) -> list[Tensor]:
    """Of every group's completions, by their number in the batch."""
    numbers = torch.arange(sum(map(len, groups)))
    return list(torch.cos(2.0 * numbers).split([len(group) for group in groups]))


def batches(dp_size: int, rows: str) -> Batch:
    """A batch for each rank. rows: `shared` prompts, `packed` one completion a row, `padded` plain text."""
    groups, advantages = all_groups(), advantages_of(all_groups())
    share = len(groups) // dp_size
    parts = [slice(start, start + share) for start in range(0, len(groups), share)]
    if rows == "padded":
        return [_as_text(groups[part], advantages[part], part.start) for part in parts], None
    made = [_packed(groups[part], advantages[part], part.start, rows) for part in parts]
    return [inputs for inputs, _ in made], [targets for _, targets in made]


def _packed(
    groups: list[list[Completion]], advantages: list[Tensor], first: int, rows: str
) -> tuple[TrainInputs, TrainTargets]:
    inputs, targets = batch_of(groups if rows == "shared" else [[c] for group in groups for c in group])
    number = [first + i for i, group in enumerate(groups) for _ in group]
    learnt = torch.tensor([i != MASKED for i in number])
    mask = targets.loss_mask & learnt[:, None]
    return inputs, dataclasses.replace(targets, advantages=torch.cat(advantages), loss_mask=mask)


def _as_text(groups: list[list[Completion]], advantages: list[Tensor], first: int) -> TextTrainBatch:
    rows = [
        (torch.cat([c.prompt_ids, c.token_ids]), len(c.prompt_ids), advantage, first + i != MASKED)
        for i, (group, values) in enumerate(zip(groups, advantages, strict=True))
        for c, advantage in zip(group, values.tolist(), strict=True)
    ]
    length = max(len(tokens) for tokens, *_ in rows)
    shape = len(rows), length
    text = TextTrainBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        target_ids=torch.zeros(shape, dtype=torch.long),
        target_mask=torch.zeros(shape, dtype=torch.bool),
        target_weights=torch.zeros(shape),
    )
    for i, (tokens, num_prompt, advantage, learnt) in enumerate(rows):
        text.input_ids[i, : len(tokens)] = tokens
        text.target_ids[i, : len(tokens) - 1] = tokens[1:]
        text.target_mask[i, num_prompt - 1 : len(tokens) - 1] = learnt
        text.target_weights[i] = advantage
    return text


def as_rank(actor: type, **kwargs: Any) -> Any:
    """An actor as its process in a mesh would make it."""
    made = actor.__new__(actor)
    made.rank, made.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made.__init__(**kwargs)
    return made


async def run(plan: dict[str, Any], exported: Path) -> dict[str, Any]:
    """STEPS steps and an export; what was seen.

    plan: `folder` of the model, `parallelism`, `training`, `rows`, `by_tokens`; with `more` also the
    untrained reference, other losses, and passes with a broken loss and a broken episode.
    """
    training = {"seq_len": 64, "dtype": "float32", "steps": STEPS, "max_grad_norm": MAX_GRAD_NORM}
    training["max_skipped_steps"] = 0
    shared = {
        "model": plan["folder"],
        "training": {**training, **plan["training"]},
        "parallelism": plan["parallelism"],
    }
    loss = MeanOverTokens() if plan["by_tokens"] else WeightedLogprobs()
    gathering.AHEAD_NBYTES = 100_000  # the model is tiny
    trainer = as_rank(TitanTrainer, loss=loss, optimizer=OPTIMIZER, lr_scheduler=SCHEDULE, **shared)
    await trainer.setup()
    inputs, targets = batches(trainer.learner.model.job.dp_size, plan["rows"])
    evaluated = await trainer.evaluate(inputs, targets)
    results = [await trainer.train_step(inputs, targets) for _ in range(STEPS - 1)]
    # the last one of two equal gradients, which clipping makes one; what comes between must change nothing
    results.append(await trainer.forward_backward(inputs, targets))
    await trainer.score(PROBE)
    await trainer.forward_backward(inputs, targets)
    await trainer.evaluate(inputs, targets)
    update = await trainer.optim_step()
    results[-1].metrics.update(update, grad_norm=update["grad_norm"] / 2)
    scores = await trainer.score(PROBE)  # at once: by no weights that were gathered before the update
    await trainer.export(str(exported))
    pieces, published = _published(trainer, exported)
    return {
        "evaluated": evaluated.loss,
        "steps": [{"loss": r.loss, **r.metrics} for r in results],
        "scores": scores.tolist(),
        "pieces": [(p.name, p.box.offsets, p.box.shape) for p in pieces],
        "published": published,
        **(await _more(trainer, shared) if plan.get("more") else {}),
    }


def _published(trainer: TitanTrainer, exported: Path) -> tuple[list[Piece], float]:
    """The pieces that this rank would push, and how far any value is from the exported weights."""
    model = trainer.learner.model
    weights, merge = load_file(exported / "model.safetensors"), model.merge()
    placed, _ = plan_pieces(model.hf_tensors())
    difference = 0.0
    for piece, local in placed:
        part = local if merge is None else merge.part(piece.name, local, piece.box)
        apart = part.to(model.dtype) - weights[piece.name][piece.box.slices]
        difference = max(difference, float(apart.abs().max()))
    return [piece for piece, _ in placed], difference


async def _more(trainer: TitanTrainer, shared: dict[str, Any]) -> dict[str, Any]:
    reference = as_rank(ReferenceModel, **shared)
    await reference.setup()
    logprobs = await reference.logprobs([c for group in all_groups() for c in group])
    job = trainer.learner.model.job
    inputs, targets = batches(job.dp_size, "shared")
    assert targets is not None
    too_long = dataclasses.replace(all_groups()[0][0], prompt_ids=torch.ones(64, dtype=torch.long))
    refused = await _message(reference.logprobs([*all_groups()[1], too_long]))
    asked = await _asked(trainer)
    others = await _other_losses(trainer)
    trainer.learner.loss = Clueless(raises=job.dp_rank == job.dp_size - 1)
    raised = await _message(trainer.forward_backward(inputs, targets))
    trainer.learner.loss = Refusing(raises=trainer.rank == trainer.world_size - 1)
    told = await _message(trainer.train_step(inputs, targets))
    targets[-1].advantages[-1] = torch.nan
    trainer.learner.loss = trainer.loss
    error = await _message(trainer.forward_backward(inputs, targets))
    agreed = await _message(asyncio.to_thread(from_rank_0, lambda: 1 // 0, trainer.rank))
    seen = {"reference": torch.cat(logprobs).tolist(), "refused": refused, "error": error}
    seen["told"] = told
    return {**seen, **asked, "raised": raised, "num_dp": job.dp_size, "agreed": agreed, "losses": others}


async def _asked(trainer: TitanTrainer) -> dict[str, Any]:
    """What endpoints say that change nothing: log-probabilities, what a loss makes of them, norms."""
    inputs, targets = batches(trainer.learner.model.job.dp_size, "shared")
    assert targets is not None
    trainer.learner.loss = PPOLoss(correction=OffPolicyCorrection("decoupled"))
    logprobs = await trainer.logprobs(inputs, targets)
    given = [dataclasses.replace(t, proximal_logprobs=p) for t, p in zip(targets, logprobs, strict=True)]
    told = (await trainer.evaluate(inputs, given)).metrics
    masked_out = [float(p[~t.loss_mask].abs().sum()) for t, p in zip(targets, logprobs, strict=True)]
    flat = torch.cat([p[t.loss_mask] for t, p in zip(targets, logprobs, strict=True)]).tolist()
    norms = await trainer.gradient_norms(inputs, given)
    trainer.learner.loss = trainer.loss
    ratios = [told["ratio_mean"], told["ratio_max"]]
    return {"logprobs": flat, "ratios": ratios, "ess": told["ess"], "norms": norms, "masked": sum(masked_out)}


async def _other_losses(trainer: TitanTrainer) -> dict[str, Any]:
    """What each of `losses` says of the batch, of which no update is made, and the state of the one that has
    one: after a step of one pass and a step of two."""
    inputs, targets = batches(trainer.learner.model.job.dp_size, "shared")
    assert targets is not None
    targets = [with_extras(t, t.advantages) for t in targets]
    seen: dict[str, Any] = {}
    every = losses()
    for name, loss in every.items():
        trainer.learner.loss = loss
        given = without_proximal(targets) if loss is own_loss else targets
        result = await trainer.forward_backward(inputs, given)
        norm = await asyncio.to_thread(trainer.learner.update.clip)
        trainer.learner.forget()
        seen[name] = [result.loss, norm, result.metrics]
    loss = trainer.learner.loss = every["dapo"]
    states = [loss.beta]
    first = await trainer.train_step(inputs, targets)
    states.append(loss.beta)
    kls = [first.metrics["kl"]]
    passes = [
        await trainer.forward_backward(inputs, targets),
        await trainer.forward_backward(inputs, targets),
    ]
    await trainer.optim_step()
    kls.append(sum(result.metrics["kl"] for result in passes) / 2)
    await trainer.evaluate(inputs, targets)
    return {**seen, "betas": [*states, loss.beta], "kls": kls}


async def _message(call: Awaitable[Any]) -> str:
    try:
        await call
    except (ForgeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Clueless(WeightedLogprobs):
    """Raises for its first micro-batch, or for none."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def from_logprobs(self, *args: Tensor) -> Result:
        if self.raises:
            raise ZeroDivisionError("the loss has no idea")
        return super().from_logprobs(*args)


class Refusing(WeightedLogprobs):
    """Does not want to be told of a step, by words that a trainer has another use for, or does."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def after_step(self, metrics: Mapping[str, float]) -> None:
        if self.raises:
            raise NotFinite("no")


def be_rank(rank: int, out: Path, plans: list[dict[str, Any]]) -> None:
    """Runs every plan, one after the other, and writes down what this rank saw."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)

    async def run_all() -> list[dict[str, Any]]:
        return [await run(plan, out / f"model{i}") for i, plan in enumerate(plans)]

    (out / f"rank{rank}.json").write_text(json.dumps(asyncio.run(run_all())))
    dist.destroy_process_group()


def main(out: Path, plans: list[dict[str, Any]]) -> None:
    importlib.import_module("forge.actors.trainer.learner")
    context = multiprocessing.get_context("fork")
    world_size = int(os.environ["WORLD_SIZE"])
    ranks = [context.Process(target=be_rank, args=(rank, out, plans)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    left = {rank.sentinel: rank for rank in ranks}
    while left:  # the first that fails ends all: the others may wait for it
        for sentinel in multiprocessing.connection.wait(list(left)):
            rank = left.pop(sentinel)  # type: ignore[arg-type]
            rank.join()
            if rank.exitcode:
                os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
