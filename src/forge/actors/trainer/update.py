"""From gathered gradients to new weights: clipping, optimizer, learning rate."""

from torch import nn

from forge.actors import _titan as titan
from forge.actors.trainer.options import OptimizerOptions, SchedulerOptions, TrainingOptions


class Update:
    """torchtitan's optimizer and schedule containers over one model."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerOptions,
        scheduler: SchedulerOptions,
        training: TrainingOptions,
    ) -> None:
        self.parameters = list(module.parameters())
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
        ).build(model_parts=[module])
        self.schedulers = titan.LRSchedulersContainer.Config(
            warmup_steps=scheduler.warmup_steps, decay_ratio=0.0
        ).build(optimizers=self.optimizers, training_steps=max(training.steps, scheduler.warmup_steps))

    def clip(self) -> float:
        """Scales the gradients down to the largest norm allowed; returns the norm they had, of all shards."""
        return float(titan.clip_grad_norm_(self.parameters, self.max_norm, foreach=True))

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
