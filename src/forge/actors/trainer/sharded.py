"""A model shared out over this job's processes and loaded, and passes through it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forge.actors import _titan as titan
from forge.actors.trainer import lora
from forge.actors.trainer.agreement import as_forge_error, own_rank
from forge.actors.trainer.feed import Feed, Query, feed_of
from forge.actors.trainer.gathering import whole_tensors
from forge.actors.trainer.job import Job
from forge.actors.trainer.model import model_spec
from forge.actors.trainer.options import ParallelismOptions, TrainingOptions
from forge.actors.trainer.parts import build_parts, build_whole
from forge.actors.trainer.pipeline import Pipeline
from forge.actors.trainer.readout import Readout
from forge.actors.trainer.source import ModelSource
from forge.data_models import TrainInputs
from forge.errors import ForgeError
from forge.hardware import fast_dtype, warn_of_slow_bfloat16

logger = logging.getLogger(__name__)

Read = Callable[[int, Readout], Tensor]
"""What is wanted of the model's answer to a query, of which the number is given."""


class ShardedModel:
    """The model object that trainer and reference share, so that both compute the same numbers.

    In bfloat16 one process computes under autocast: weights, residual stream and norms stay float32, which
    brings log-probabilities 40 % closer to float32 than bfloat16 throughout, at the same speed. More than one
    process follow FSDP's mixed precision instead, which gathers bfloat16 weights.
    """

    def __init__(
        self,
        source: ModelSource,
        training: TrainingOptions,
        parallelism: ParallelismOptions,
        *,
        world_size: int = 1,
        trainable: bool = True,
        seed: int = 0,
    ) -> None:
        """Raises ConfigError where the model can't be cut as `parallelism` says.

        With `training.lora` the model has adapters, which alone are trained; one that is not trainable has
        none.
        """
        parallelism.check(world_size)
        parallelism.check_model(source.config)
        self.source = source
        self.seq_len = training.seq_len
        self.vocab_size: int = source.config.vocab_size
        self.lora = training.lora if trainable else None
        spec = model_spec(source.config, training.seq_len, self.lora)
        self.job = Job(parallelism, world_size=world_size, seed=seed, cpu_offload=training.cpu_offload)
        on_gpu = self.job.device.type != "cpu"
        if training.dtype == "auto":
            training = replace(training, dtype=fast_dtype(on_gpu=on_gpu))
        self.dtype = titan.TORCH_DTYPE_MAP[training.dtype]
        if own_rank() == 0 and not on_gpu and self.dtype == torch.bfloat16:
            warn_of_slow_bfloat16("the trainer" if trainable else "the reference model")
        self._autocast = world_size == 1 and self.dtype != torch.float32
        whole = build_whole(spec, self.job)
        assert spec.state_dict_adapter is not None
        self.adapter = spec.state_dict_adapter(spec.model, None)
        names = self.adapter.to_hf(whole.state_dict())
        self.parts = build_parts(whole, spec, self.job, training)
        for part in self.parts:
            part.train(trainable)
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(trainable and (self.lora is None or lora.is_adapter(name)))
        # tensors of other stages are checked, and not filled: they are on the meta device
        source.load({**names, **self.hf_tensors()}, seed)
        self.base = None if self.lora is None else source.fingerprint(seed)  # of what adapters are on
        lora.draw(self.adapters(), seed)
        if self._autocast and not trainable:
            self._round_projections()
        self._pipeline = None
        if self.job.pp_mesh is not None:
            self._pipeline = Pipeline(self.parts, self.job, source.config.hidden_size, self.dtype)

    def _round_projections(self) -> None:
        """Stores rounded what autocast would round in every pass: equal numbers in less time and memory."""
        for module in self._modules():
            if isinstance(module, titan.Linear):
                for name, value in module.named_parameters():
                    setattr(module, name, nn.Parameter(value.to(self.dtype), requires_grad=False))

    def _modules(self) -> list[nn.Module]:
        return [module for part in self.parts for module in part.modules()]

    @property
    def device(self) -> torch.device:
        return self.job.device

    def hf_tensors(self) -> dict[str, Tensor]:
        """The live weights by their Hugging Face names, or this process's part of them; tied ones once.
        Adapters are not among them, nor in them."""
        return self.adapter.to_hf(self._state())

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor for part in self.parts for name, tensor in part.state_dict().items()}

    def merge(self) -> lora.Merge | None:
        """How adapters change the weights that they are on, as of now (a collective); None without any."""
        return None if self.lora is None else lora.Merge(self.adapters(), self.lora.scale)

    def adapters(self) -> dict[str, lora.Factors]:
        """The live adapters, or this process's part of them, by the names of the weights they change."""
        return lora.factors_of(self._state(), self.adapter.to_hf)

    def whole_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every weight in full, by its Hugging Face name, adapters merged; every process must go through all
        of them."""
        merge = self.merge()
        return whole_tensors(self.hf_tensors(), self.job, dtype, None if merge is None else merge.tensor)

    def whole_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Every factor of the adapters in full, by its name in PEFT, float32; likewise."""
        return whole_tensors(lora.peft_tensors(self.adapters()), self.job, torch.float32)

    def check(self, inputs: TrainInputs, target_ids: Tensor | None = None) -> None:
        """Raises ForgeError for text that is longer than the model was built for, or not of its vocabulary.

        target_ids: those that count. To be called before anything is moved to a device, which would wait.
        """
        filled = inputs.segment_ids >= 0
        longest = int(inputs.positions[filled].max()) + 1 if filled.any() else 0
        if longest > self.seq_len:
            raise ForgeError(
                f"a prompt with its completion has {longest} tokens, training.seq_len is {self.seq_len}: "
                "raise it, or ask for shorter completions"
            )
        for ids in (inputs.input_ids[filled], target_ids):
            strange = None if ids is None else ids[(ids < 0) | (ids >= self.vocab_size)]
            if strange is not None and len(strange):
                raise ForgeError(
                    f"token ids must lie in [0, {self.vocab_size}), the model's vocabulary, got "
                    f"{int(strange[0])}: tokenize with the tokenizer of this model"
                )

    def run(self, queries: Sequence[Query], read: Read, *, backward: bool) -> ForgeError | None:
        """One pass for each query, whose tensors are on `device`; every process must have as many.

        read: called on the processes with the head only (see Job.has_head), for each query once, in order.
        backward: adds the gradients of the scalars that it returns to those of the weights.

        Returns what `read` raised, after which it is called no more: other processes, which need this one's
        passes for theirs, are to be told before it is raised. Gradients are worth nothing then.
        """
        failures: list[ForgeError] = []

        def carefully(i: int, readout: Readout) -> Tensor:
            if not failures:
                try:
                    return read(i, readout)
                except Exception as error:  # returned below
                    failures.append(as_forge_error(error, "a pass"))
            return readout.nothing()

        is_settled = False
        try:
            with self.job.running(), torch.set_grad_enabled(backward):
                self._run_all(queries, carefully, backward=backward)
            is_settled = backward
        finally:
            if not is_settled:
                self._settle()
        if not failures:
            return None
        if failures[0].__cause__ is not None:  # others see no more of it than its message
            logger.error("%s", failures[0], exc_info=failures[0].__cause__)
        return failures[0]

    def _run_all(self, queries: Sequence[Query], read: Read, *, backward: bool) -> None:
        if self._pipeline is not None:
            feed = self._feed(queries, self._pipeline.num_streams(len(queries)))
            self._pipeline.run(feed, partial(self._read, feed, read), backward=backward)
            return
        for i, query in enumerate(queries):
            feed = self._feed([query])
            hidden = self._compute(self.parts[0], feed.tokens, **feed.masks)
            value = self._read(feed, lambda _, readout, i=i: read(i, readout), 0, hidden)
            if backward:
                value.backward()

    def _settle(self) -> None:
        """Drops what FSDP keeps gathered for a backward pass, the head's weights too: `reshard` would leave
        these, as the head is called outside of the model, and the next pass would find them stale."""
        for part in self.parts:
            if isinstance(part, FSDPModule):
                part.reset_iter_state()

    def _feed(self, queries: Sequence[Query], num_streams: int = 0) -> Feed:
        mesh = self.job.cp_mesh
        if mesh is None:
            return feed_of(queries, num_streams=num_streams)
        return feed_of(queries, num_streams=num_streams, part=mesh.get_local_rank(), num_parts=mesh.size())

    def _compute(self, module: nn.Module, *args: Tensor, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, self.dtype, enabled=self._autocast):
            return module(*args, **kwargs)

    def _read(self, feed: Feed, read: Read, i: int, hidden: Tensor) -> Tensor:
        own, places = feed.own(i, hidden)
        is_padding = i >= len(feed.source_ids)
        size = 0 if is_padding else len(feed.source_ids[i])
        group = self.job.cp_mesh.get_group() if self.job.cp_mesh is not None else None
        head = partial(self._compute, self.parts[-1].get_submodule("lm_head"))
        readout = Readout(head, own, places, size, group)
        return readout.nothing() if is_padding else read(i, readout)

    @torch.no_grad()
    def logits(self, inputs: TrainInputs, source_ids: Tensor) -> Tensor:
        """Logits [M, V], on the CPU, of the tokens that follow the cells `source_ids` [M] (row * L + column).

        What is given must be on `device`, and have passed `check`. Every process must call it equally often.
        """
        return self._ask(inputs, source_ids, lambda readout: readout.logits())

    @torch.no_grad()
    def logprobs(
        self, inputs: TrainInputs, source_ids: Tensor, target_ids: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """The same for log-probabilities [M] float32 of `target_ids` [M] as the tokens that follow."""
        return self._ask(inputs, source_ids, lambda readout: readout.logprobs(target_ids, temperature)[0])

    def _ask(self, inputs: TrainInputs, source_ids: Tensor, question: Callable[[Readout], Tensor]) -> Tensor:
        answers: list[Tensor] = []

        def read(_: int, readout: Readout) -> Tensor:
            answers.append(question(readout).cpu())
            return answers[0]

        failure = self.run([Query(inputs, source_ids)], read, backward=False)
        answers, failure = self.job.from_head((answers, failure))
        if failure is not None:
            raise failure
        return answers[0]

    def close(self) -> None:
        """Leaves the job's other processes."""
        self.job.close()
