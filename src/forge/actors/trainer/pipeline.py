"""Passes through a model whose layers are shared out over the processes, by torch's schedules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleGPipe,
    get_schedule_class,
)

from forge.actors.trainer.feed import Feed
from forge.actors.trainer.job import Job


class Pipeline:
    """This process's parts of the model, in the order in which a batch passes through them.

    Stages and schedule are made anew for every run: torch's keep the shapes and the number of micro-batches
    of their first one. They are told all shapes, so that nothing is computed to find them out.
    """

    def __init__(self, parts: Sequence[nn.Module], job: Job, hidden_size: int, dtype: torch.dtype) -> None:
        assert job.pp_mesh is not None
        self._parts, self._job = parts, job
        self._mesh = job.pp_mesh
        self._hidden_size, self._dtype = hidden_size, dtype
        self._schedule = get_schedule_class(job.layout.pipeline_parallel_schedule)
        # the first message in a group must be one that all of its processes take part in
        job.from_head(None)

    def num_streams(self, n: int) -> int:
        """The smallest number of micro-batches, n at least, that the schedule takes."""
        size = self._mesh.size()
        while self._schedule.__name__ == "ScheduleInterleaved1F1B" and n % max(1, n // size):
            n += 1
        return n

    def run(self, feed: Feed, read: Callable[[int, Tensor], Tensor], *, backward: bool) -> None:
        """Calls read(i, hidden [1, Sq, D]) for each stream, on the process with the head.

        backward: adds the gradients of what it returns, scalars, to those of the weights. It must not raise:
        the other processes would wait for the rest of the schedule.
        """
        gradients = self._take_gradients()
        schedule = self._make_schedule(feed, lambda hidden, i: read(int(i), hidden), backward)
        run: Callable[..., object] = schedule.step if backward else schedule.eval
        run(
            *((feed.tokens,) if self._mesh.get_local_rank() == 0 else ()),
            target=torch.arange(len(feed.tokens)) if self._job.has_head else None,
            return_outputs=False,
            **feed.masks,
        )
        self._put_back(gradients)

    def _make_schedule(
        self, feed: Feed, loss: Callable[..., Tensor], backward: bool
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        size, rank = self._mesh.size(), self._mesh.get_local_rank()
        shape = (1, feed.stop - feed.start, self._hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=backward)
        stages = [
            PipelineStage(
                part,
                rank + i * size,
                size * len(self._parts),
                self._job.device,
                input_args=feed.tokens[:1].to("meta") if rank == i == 0 else hidden,
                output_args=hidden,
                group=self._mesh.get_group(),
            )
            for i, part in enumerate(self._parts)
        ]
        n = len(feed.tokens)
        settings: dict[str, Any] = {"n_microbatches": n, "loss_fn": loss, "scale_grads": False}
        if issubclass(self._schedule, PipelineScheduleMulti):
            return self._schedule([*stages], **settings)
        # 1F1B takes no fewer micro-batches than there are stages, and would hold as many as GPipe
        return (self._schedule if n >= size else ScheduleGPipe)(stages[0], **settings)

    def _take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Those gathered so far: a new schedule would drop them."""
        taken = [(p, p.grad) for part in self._parts for p in part.parameters() if p.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return taken

    def _put_back(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
