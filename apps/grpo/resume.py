"""Where a run goes on: which of its checkpoints is whole, and what may be different from then on."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from apps.grpo.config import GRPOConfig, load_config
from forge.app import Run
from forge.errors import ConfigError, ForgeError
from forge.rl.saved_loop import LoopFolder
from forge.runs import CHECKPOINTS, CONFIG

logger = logging.getLogger(__name__)

LOOP = "loop"
"""In the folder of checkpoints: what the run has beside its trainer."""

MAY_CHANGE = (
    *("steps", "output_dir", "resume", "record", "rollout_threads", "stall_timeout_s", "colocate"),
    *("checkpoint", "logging", "chaos", "launcher", "services", "weights", "parallelism", "checks"),
    *("generator.gpu_memory_utilization", "generator.enforce_eager", "generator.max_num_seqs"),
    *("generator.kv_cache_memory_gb", "generator.engine", "generator.in_flight"),
    *("training.learning_rate", "training.warmup_steps", "training.lr_decay", "training.min_lr_factor"),
    *("training.weight_decay", "training.max_grad_norm", "training.snapshot_every"),
    *("training.gradient_accumulation_steps", "training.max_tokens_per_pass", "training.max_skipped_steps"),
    *("training.activation_checkpoint", "training.compile", "training.cpu_offload"),
)
"""Keys and sections that say where, how fast and how long. All others say what is learnt, and by what."""

MAY_CHANGE_SO: dict[str, Callable[[Any, Any], bool]] = {
    "evaluation.every": lambda was, now: (was > 0) == (now > 0),  # questions held out are not trained on
    "staleness.limit": lambda was, now: now >= was,  # what was let in is not to be too old
    # there on one side only: episodes that wait and those to come would not go into one batch
    "services.ref_model": lambda was, now: False,
}
"""Keys that may change from one value to another if this holds."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a run goes on from."""

    named: dict[str, Any] = field(default_factory=dict)  # what it says: {"step": N, ...}; {}: there is none
    num_updates: int | None = None  # optimizer steps, by which it is called; 0: none, None: nobody looked

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.named.get("step", 0)


def resume_point(config: GRPOConfig, run: Run) -> ResumePoint:
    """Where the run goes on. Raises ConfigError where the configuration asks for another run."""
    if not run.resumed:
        return ResumePoint()
    refuse_changes(config, run.folder)
    return newest_saved(run.folder / CHECKPOINTS)


def refuse_changes(config: GRPOConfig, folder: Path) -> None:
    """Raises ConfigError, naming each key, where the run in this folder was started to do something else."""
    earlier = load_config(["--config", str(folder / CONFIG)]).config
    changes = [
        f"{key} {was!r} (now {now!r})"
        for key, was, now in _changes(earlier, config)
        if not _may_change(key, was, now)
    ]
    if changes:
        raise ConfigError(
            f"the run in {folder} was started with {', '.join(changes)}, and can't go on as another: set "
            "that back, or start a new run"
        )


def newest_saved(checkpoints: Path) -> ResumePoint:
    """The newest checkpoint that is whole.

    One whose files, or whose loop's, are damaged or gone is passed over, which the log says. Raises
    ForgeError when all of them are.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # takes seconds

    from forge.actors.trainer.checkpoint_folder import CheckpointFolder
    from forge.actors.trainer.checkpoint_state import saved_state

    folder, loops = CheckpointFolder(checkpoints), LoopFolder(checkpoints / LOOP)
    folder.tidy()
    damaged: dict[int, str] = {}
    point = ResumePoint(num_updates=0)
    for step in reversed(folder.steps()):
        damage = folder.damage(step)
        if damage is None:
            try:
                point = ResumePoint(saved_state(folder.of(step)), step)
            except (Exception, CheckpointException) as error:  # garbage raises whatever it likes
                damage = f"its state can't be read ({type(error).__name__})"
            else:
                damage = loops.damage(point.named)
        if damage is None:
            break
        damaged[step] = damage
        logger.error("%s can't be gone on from: %s. The one before it is tried", folder.of(step), damage)
    else:
        if damaged:
            listed = "; ".join(f"step-{step}: {damage}" for step, damage in damaged.items())
            raise ForgeError(
                f"no checkpoint in {checkpoints} can be gone on from ({listed}): put the files back, or "
                "start a new run"
            )
    for step in damaged:
        folder.set_aside(step)
    return point


def _may_change(key: str, was: Any, now: Any) -> bool:
    if key in MAY_CHANGE_SO:
        return MAY_CHANGE_SO[key](was, now)
    return any(key == known or key.startswith(f"{known}.") for known in MAY_CHANGE)


def _changes(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys with both values, where these differ; a section that one of the two lacks is one value."""
    for f in fields(was):
        key, old, new = f"{path}{f.name}", getattr(was, f.name), getattr(now, f.name)
        if is_dataclass(old) and is_dataclass(new):
            yield from _changes(old, new, f"{key}.")
        elif old != new:
            yield key, old, new
