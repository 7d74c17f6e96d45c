"""[3] ReferenceModel: what a frozen model thinks of the tokens that the policy sampled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from forge.actors.memory import keep_freed_memory, release_cached_memory
from forge.actors.trainer.options import model_options
from forge.controller import ForgeActor, endpoint
from forge.data_models import Completion, TrainInputs
from forge.errors import ForgeError
from forge.rl.collate import pack_completions

if TYPE_CHECKING:
    from forge.actors.trainer.micro_batch import MicroBatch
    from forge.actors.trainer.sharded import ShardedModel

T = TypeVar("T")
R = TypeVar("R")
Groups = dict[tuple[float, tuple[int, ...]], list[int]]
"""Temperature and prompt -> which completions have them."""


class ReferenceModel(ForgeActor):
    """The trainer's model, never trained.

    Equal weights and dtype give numbers equal to the trainer's, as far as both have one process or both
    several: in bfloat16 one computes under autocast with a float32 residual stream, several as FSDP does
    (see forge.actors.trainer.sharded).
    """

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

        Every cell is read as text, the padding of a prompt too, which changes what is thought of the tokens
        behind it; `logprobs` needs no padding. Raises ForgeError for rows longer than `training.seq_len`.

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

        Completions of one prompt cost that prompt once. What is found depends on the completions of this
        call alone, to the bit: calls do not share passes. Raises ForgeError for completions that can't be
        scored: without prompt_ids, empty, or longer with their prompt than `training.seq_len`.
        """
        return await self.run_blocking(self._logprobs, list(completions))

    @endpoint(retry=True)
    async def release_memory(self) -> None:
        """Gives back what it keeps of the GPU's memory for its next passes."""
        await self.run_blocking(release_cached_memory)

    @torch.no_grad()
    def _forward(self, input_ids: Tensor, num_prompt: int, return_logprobs: bool) -> Tensor:
        num_rows, length = input_ids.shape
        self.model.check(_as_inputs(input_ids))
        per_pass = min(self._tokens_per_pass(input_ids.numel()) // length, num_rows)
        parts = list(input_ids.to(self.model.device).split(max(1, per_pass)))
        found = self._each(parts, lambda ids: self._predict(ids, num_prompt, return_logprobs))
        return torch.cat(found).view(num_rows, length - num_prompt, *found[0].shape[1:])

    def _predict(self, input_ids: Tensor, num_prompt: int, return_logprobs: bool) -> Tensor:
        """Logits or log-probabilities of what stands behind the prompts of some rows, row by row."""
        num_rows, length = input_ids.shape
        inputs = _as_inputs(input_ids)
        cells = torch.arange(num_rows * length, device=input_ids.device).view(num_rows, length)
        sources = cells[:, num_prompt - 1 : -1].flatten()
        if not return_logprobs:
            return self.model.logits(inputs, sources).float()
        return self.model.logprobs(inputs, sources, input_ids[:, num_prompt:].flatten())

    @torch.no_grad()
    def _logprobs(self, completions: list[Completion]) -> list[Tensor]:
        groups = _groups(completions)
        num_tokens = sum(len(prompt) for _, prompt in groups) + sum(len(c.token_ids) for c in completions)
        parts = _passes(groups, completions, self._tokens_per_pass(num_tokens))
        # all of them on every rank: one that can't be scored is an error on all before the first pass
        packed = [self._pack([[completions[i] for i in row] for row in part]) for part in parts]
        scored = self._each(packed, self._score)
        places = [i for part in parts for row in part for i in row]
        found = dict(zip(places, (tensor for tensors in scored for tensor in tensors), strict=True))
        return [found[i] for i in range(len(completions))]

    def _pack(self, groups: list[list[Completion]]) -> "MicroBatch":
        """Completions of one temperature, checked; what the generator thought of them is not read."""
        unread = [
            [replace(c, logprobs=torch.zeros(len(c.token_ids))) for c in completions]
            for completions in groups
        ]
        inputs, targets = pack_completions(unread)
        self.model.check(inputs)
        return inputs, targets

    def _score(self, packed: "MicroBatch") -> list[Tensor]:
        """Log-probabilities of the completions, in their order."""
        from forge.actors.trainer.micro_batch import to_device

        inputs, targets = to_device(packed, self.model.device)
        mask = targets.loss_mask
        logprobs = self.model.logprobs(
            inputs, targets.source_ids[mask], targets.target_ids[mask], targets.temperature
        )
        return list(logprobs.split(mask.sum(-1).tolist()))

    def _tokens_per_pass(self, num_tokens: int) -> int:
        """As many as a pass may have, and few enough that every data-parallel rank gets a pass."""
        share = -(-num_tokens // self.model.job.dp_size)
        return min(share, self.config.training.max_tokens_per_pass or share)

    def _each(self, parts: list[T], compute: Callable[[T], R]) -> list[R]:
        """Computes every part on one data-parallel rank; all ranks get all results.

        Sharded passes need as many of them on every rank: one without a part left repeats another.
        """
        if not parts:
            return []
        job = self.model.job
        own = range(job.dp_rank, -(-len(parts) // job.dp_size) * job.dp_size, job.dp_size)
        by_rank = job.gather([compute(parts[i % len(parts)]) for i in own])
        return [by_rank[i % job.dp_size][i // job.dp_size] for i in range(len(parts))]


def _as_inputs(input_ids: Tensor) -> TrainInputs:
    """input_ids [B, L] as rows of one segment."""
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    return TrainInputs(input_ids, columns.expand(input_ids.shape), torch.zeros_like(input_ids))


def _groups(completions: Sequence[Completion]) -> Groups:
    groups: Groups = {}
    for i, completion in enumerate(completions):
        prompt = () if completion.prompt_ids is None else tuple(completion.prompt_ids.tolist())
        groups.setdefault((completion.temperature, prompt), []).append(i)
    return groups


def _passes(groups: Groups, completions: Sequence[Completion], max_tokens: int) -> list[list[list[int]]]:
    """Passes of one temperature, made of rows of one prompt, made of indices into the completions.

    A pass has at most `max_tokens` tokens, a row's prompt counted once, or a single completion.
    """
    passes: list[list[list[int]]] = []
    used, last_temperature = 0, None
    for (temperature, prompt), members in sorted(groups.items(), key=lambda item: item[0][0]):
        row: list[int] | None = None
        for i in members:
            cost = len(completions[i].token_ids) + (len(prompt) if row is None else 0)
            if temperature != last_temperature or used + cost > max_tokens:
                passes.append([])
                used, last_temperature, row = 0, temperature, None
                cost = len(completions[i].token_ids) + len(prompt)
            if row is None:
                row = []
                passes[-1].append(row)
            row.append(i)
            used += cost
    return passes
