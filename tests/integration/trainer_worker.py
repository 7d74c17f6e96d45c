"""One rank of a trainer in a process of its own: python -m tests.integration.trainer_worker OUT PLANS."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge.actors.reference_model import ReferenceModel
from forge.actors.trainer import TitanTrainer
from forge.data_models import TrainInputs, TrainTargets
from forge.errors import ForgeError
from forge.rl.loss import GRPOLoss
from tests.integration.trainer_cases import batch_of, completion_groups

LENGTHS = ((3, 7, 1), (5,), (2, 9), (4, 4))  # completions of each prompt
CUT = 1  # with two data-parallel ranks the first has this many prompts


def batches(dp_size: int) -> tuple[list[TrainInputs], list[TrainTargets]]:
    """The same episodes for one rank or shared out over two, unevenly."""
    groups = completion_groups(lengths=LENGTHS)
    parts = [groups] if dp_size == 1 else [groups[:CUT], groups[CUT:]]
    first = [0, sum(len(group) for group in groups[:CUT])]
    made = [batch_of(part, number) for part, number in zip(parts, first, strict=False)]
    return [inputs for inputs, _ in made], [targets for _, targets in made]


def as_rank(actor: type, **kwargs: Any) -> Any:
    """An actor as its process in a mesh would make it."""
    made = actor.__new__(actor)
    made.rank, made.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made.__init__(**kwargs)
    return made


async def run(plan: dict[str, Any], exported: Path) -> dict[str, Any]:
    """Two steps, an export, the untrained reference, a third step with a broken episode; what was seen.

    plan: `folder` of the model, `parallelism`, and optionally `dtype`.
    """
    training = {"seq_len": 64, "dtype": plan.get("dtype", "float32"), "gradient_accumulation_steps": 2}
    shared = {"model": plan["folder"], "training": training, "parallelism": plan["parallelism"]}
    loss = GRPOLoss(beta=0.0, agg_type="token_mean")
    trainer = as_rank(TitanTrainer, loss=loss, optimizer={"lr": 1e-3, "eps": 1e-6}, **shared)
    await trainer.setup()
    inputs, targets = batches(trainer.learner.model.dp_size)
    results = [await trainer.train_step(inputs, targets) for _ in range(2)]
    await trainer.export(str(exported))

    reference = as_rank(ReferenceModel, **shared)
    await reference.setup()
    flat = [c for group in completion_groups(lengths=LENGTHS) for c in group]
    logprobs = await reference.logprobs(flat)

    targets[-1].advantages[0] = torch.nan
    message = ""
    try:
        await trainer.train_step(inputs, targets)
    except ForgeError as error:
        message = str(error)
    return {
        "steps": [{"loss": r.loss, **r.metrics} for r in results],
        "reference": torch.cat(logprobs).tolist(),
        "error": message,
    }


async def main(out: Path, plans: list[dict[str, Any]]) -> None:
    facts = [await run(plan, out / f"model{i}") for i, plan in enumerate(plans)]
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
