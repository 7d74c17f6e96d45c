"""The end of a run: its model, and what there is to do for one that was resumed after its last step."""

import asyncio
import json
from pathlib import Path
from typing import Any

from apps.grpo.actors import start_trainer
from apps.grpo.config import GRPOConfig
from apps.grpo.loop import EVALUATED
from apps.grpo.models import fetch_models
from apps.grpo.resume import ResumePoint
from forge.app import METRICS, Run
from forge.controller import ActorHandle
from forge.observability.jsonl import read_rows

MODEL = "model"
"""In the folder of a run: the trained model, as a Hugging Face folder."""

EXPORTED = "exported.json"
"""Within that: what the checkpoint of its weights names, written last. A run may go on after its model was
exported, and end in another checkpoint."""


async def is_over(config: GRPOConfig, run: Run, point: ResumePoint) -> bool:
    """Whether all steps were done and measured; says so, and exports the model if a kill came before that."""
    step = point.step
    is_measured = not config.evaluation.every or step > config.steps or _is_evaluated(run.folder, step)
    if step < config.steps or not is_measured:
        return False
    print(f"{run.folder} has done its {step} steps: none is left (steps is {config.steps})", flush=True)
    if not is_exported(run.folder, point.named):
        model, _ = await asyncio.to_thread(fetch_models, config)
        trainer = await start_trainer(config, config.algorithm(), model, run.folder, point.num_updates)
        await export(trainer, run.folder, point.named)
        print(f"the model, which it lacked, is in {run.folder / MODEL}", flush=True)
    return True


async def export(trainer: ActorHandle, run: Path, saved: dict[str, Any]) -> None:
    """Writes the model to the folder of the run. saved: what the checkpoint of these weights names."""
    await trainer.export.call(str(run / MODEL))
    (run / MODEL / EXPORTED).write_text(json.dumps(saved))


def _is_evaluated(run: Path, step: int) -> bool:
    return any(row["step"] == step and EVALUATED in row for row in read_rows(run / METRICS))


def is_exported(run: Path, saved: dict[str, Any]) -> bool:
    """Whether the exported model has the weights of the checkpoint that names this, all of them."""
    file = run / MODEL / EXPORTED
    return file.is_file() and file.read_text() == json.dumps(saved)
