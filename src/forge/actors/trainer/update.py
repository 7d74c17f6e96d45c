"""From gathered gradients to new weights: clipping, optimizer, learning rate."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from forge.actors import _titan as titan
from forge.actors.trainer.options import OptimizerOptions, SchedulerOptions, TrainingOptions


class Update:
    """torchtitan's optimizer and schedule containers over the parts of one model."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: OptimizerOptions,
        scheduler: SchedulerOptions,
        training: TrainingOptions,
        pp_mesh: DeviceMesh | None = None,
    ) -> None:
        self.parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        self.pp_mesh = pp_mesh  # of the processes that hold the other parts
        self.max_norm = training.max_grad_norm
        group = titan.ParamGroupConfig(
            pattern=".*",
            optimizer_name=optimizer.name,
            optimizer_kwargs={
                "lr": optimizer.lr,
                "betas": tuple(optimizer.betas),
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
            },
        )
        self.optimizers = titan.OptimizersContainer.Config(
            param_groups=[group], implementation="fused"
        ).build(model_parts=list(parts))
        last = max(training.steps, scheduler.warmup_steps)
        self.schedulers = titan.LRSchedulersContainer.Config(
            warmup_steps=scheduler.warmup_steps,
            decay_ratio=0.0 if scheduler.decay == "constant" else None,  # None: all steps behind the warm-up
            decay_type="linear" if scheduler.decay == "constant" else scheduler.decay,
            min_lr_factor=scheduler.min_lr_factor,
        ).build(optimizers=self.optimizers, training_steps=last)
        for each in self.schedulers.schedulers:  # after the last step torchtitan's go below 0, or up again
            assert isinstance(each, LambdaLR)
            each.lr_lambdas = [partial(_until, last, factor) for factor in each.lr_lambdas]

    def clip(self) -> float:
        """Scales the gradients down to the largest norm allowed; returns the norm they had, of all parts and
        shards."""
        return float(
            titan.clip_grad_norm_(self.parameters, self.max_norm, foreach=True, pp_mesh=self.pp_mesh)
        )

    def norm(self) -> float:
        """The norm of the gradients, of all parts and shards, which stay as they are."""
        return float(titan.clip_grad_norm_(self.parameters, math.inf, foreach=True, pp_mesh=self.pp_mesh))

    def step(self) -> float:
        """Updates the weights and drops the gradients; returns the learning rate it used."""
        [lr] = {float(value) for value in self.schedulers.get_metrics().values()}
        self.optimizers.step()
        self.schedulers.step()
        self.zero_grad()
        return lr

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.optimizers.zero_grad()

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        return self.schedulers.state_dict()["last_epoch"]

    def tensors(self) -> list[Tensor]:
        """The weights that are trained and what the optimizer remembers of each, this rank's part, live, in a
        fixed order."""
        found: list[Tensor] = [*self.parameters]
        for optimizer in self.optimizers:
            for parameter in self.parameters:
                found += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
        return [t.to_local() if isinstance(t, DTensor) else t for t in map(Tensor.detach, found)]

    def allocate(self) -> None:
        """Gives `tensors` its full length before the first step; what they hold is to be overwritten."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizers.step()
        self.zero_grad()

    def resume(self, num_steps: int) -> None:
        """Sets the learning rate to that of the step after so many."""
        self.schedulers.load_state_dict({"last_epoch": num_steps})
        for scheduler in self.schedulers.schedulers:
            groups = scheduler.optimizer.param_groups
            for group, lr in zip(groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr


def _until(last: int, factor: Callable[[int], float], step: int) -> float:
    """A factor of the learning rate that stays what it is at the last step."""
    return factor(min(step, last))
