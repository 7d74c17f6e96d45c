"""[3] ReferenceModel: what a frozen model thinks of the tokens that the policy sampled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from forge.actors.trainer.memory import keep_freed_memory
from forge.actors.trainer.options import model_options
from forge.controller import ForgeActor, endpoint
from forge.data_models import Completion, TrainInputs
from forge.errors import ForgeError
from forge.rl.collate import pack_completions

if TYPE_CHECKING:
    from forge.actors.trainer.sharded import ShardedModel


class ReferenceModel(ForgeActor):
    """The trainer's model, never trained: equal weights and dtype give numbers equal to the trainer's."""

    compute_bound: ClassVar[bool] = True
    model: "ShardedModel"

    def __init__(
        self,
        model: Mapping[str, Any] | str | Path,
        training: Mapping[str, Any] | None = None,
        parallelism: Mapping[str, Any] | None = None,
    ) -> None:
        """The keys of each section stand in forge.actors.trainer.options; a wrong one is a ConfigError."""
        self.config = model_options(model, training or {}, parallelism or {})
        self.config.check(self.world_size)

    async def setup(self) -> None:
        """Builds, shards and loads the model."""
        keep_freed_memory()
        self.model = await self.run_blocking(self._build)

    def _build(self) -> "ShardedModel":
        from forge.actors.trainer.sharded import ShardedModel  # takes seconds: torchtitan
        from forge.actors.trainer.source import resolve_model

        return ShardedModel(
            resolve_model(self.config.model),
            self.config.training,
            self.config.parallelism,
            world_size=self.world_size,
            trainable=False,
        )

    async def teardown(self) -> None:
        """Leaves the other ranks."""
        if hasattr(self, "model"):  # setup may have failed
            await self.run_blocking(self.model.close)

    @endpoint
    async def forward(self, input_ids: Tensor, max_req_tokens: int, return_logprobs: bool = True) -> Tensor:
        """input_ids [B, L], rows that start with a prompt padded or cut to `max_req_tokens` tokens.

        Returns log-probabilities [B, L - max_req_tokens] of the tokens behind it, float32 in nats, or with
        return_logprobs=False the logits [B, L - max_req_tokens, V] that predict them, float32.
        """
        length = input_ids.shape[1]
        if not 1 <= max_req_tokens < length:
            raise ForgeError(
                f"max_req_tokens must cut rows of {length} tokens into two parts, got {max_req_tokens}"
            )
        return await self.run_blocking(self._forward, input_ids, max_req_tokens, return_logprobs)

    @endpoint
    async def logprobs(self, completions: Sequence[Completion]) -> list[Tensor]:
        """Log-probabilities of each completion's tokens, [T] float32 in nats, at its sampling temperature.

        Completions of one prompt cost that prompt once.
        """
        return await self.run_blocking(self._logprobs, list(completions))

    @torch.no_grad()
    def _forward(self, input_ids: Tensor, num_prompt: int, return_logprobs: bool) -> Tensor:
        rows, length = input_ids.shape
        columns = torch.arange(length, device=self.model.device)
        inputs = TrainInputs(
            input_ids=input_ids.to(self.model.device),
            positions=columns.expand(rows, length),
            segment_ids=torch.zeros(rows, length, dtype=torch.long, device=self.model.device),
        )
        cells = torch.arange(rows, device=self.model.device)[:, None] * length + columns
        sources = cells[:, num_prompt - 1 : -1].flatten()
        if not return_logprobs:
            return self.model.logits(inputs, sources).float().view(rows, length - num_prompt, -1)
        targets = inputs.input_ids[:, num_prompt:].flatten()
        return self.model.logprobs(inputs, sources, targets).view(rows, length - num_prompt)

    @torch.no_grad()
    def _logprobs(self, completions: list[Completion]) -> list[Tensor]:
        groups: dict[tuple[float, tuple[int, ...]], list[int]] = {}
        for i, completion in enumerate(completions):
            prompt = () if completion.prompt_ids is None else tuple(completion.prompt_ids.tolist())
            groups.setdefault((completion.temperature, prompt), []).append(i)
        found: dict[int, Tensor] = {}
        for temperature in {temperature for temperature, _ in groups}:
            members = [ids for (t, _), ids in groups.items() if t == temperature]
            scored = self._score([[completions[i] for i in ids] for ids in members])
            found.update(zip([i for ids in members for i in ids], scored, strict=True))
        return [found[i] for i in range(len(completions))]

    def _score(self, groups: list[list[Completion]]) -> list[Tensor]:
        """Log-probabilities of completions of one temperature, in their order."""
        from forge.actors.trainer.micro_batch import to_device

        inputs, targets = to_device(pack_completions(groups), self.model.device)
        mask = targets.loss_mask
        logprobs = self.model.logprobs(
            inputs, targets.source_ids[mask], targets.target_ids[mask], targets.temperature
        )
        return list(logprobs.split(mask.sum(-1).tolist()))
