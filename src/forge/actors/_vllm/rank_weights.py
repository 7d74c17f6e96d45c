"""RankWeights: how the weights of one rank of the engine are exchanged."""

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from forge.actors._vllm.load_plan import LoadPlan
from forge.actors._vllm.proof import check_parameter
from forge.actors._vllm.swap import Swap, can_swap
from forge.actors._vllm.threads import use_one_thread
from forge.actors._vllm.unprocessed import reshaped
from forge.weights import Box, Shards


class RankWeights:
    """From the boxes that this rank fetched of a version to the model that computes with them.

    Where all layers are plain ones on a CPU, new weights are packed beside the old ones while the engine
    runs, and `load` only exchanges the two. Elsewhere `load` has vLLM load them in place, to keep the
    addresses that captured graphs hold, and compares what is there then with what was fetched.

    model: this rank's part; shapes: of the checkpoint's tensors; reload: loads named whole tensors in place.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        reload: Callable[[Iterator[tuple[str, Tensor]]], None],
        *,
        is_compiled: bool,
    ) -> None:
        self._model = model
        self._shapes = dict(shapes)
        self._reload = reload
        self._swaps = current_platform.is_cpu() and not is_compiled
        self._staged: Shards | None = None
        self._next: Swap | None = None
        self._thread = ThreadPoolExecutor(1, "weights", initializer=use_one_thread)
        self.use(LoadPlan.of(model, shapes))

    def use(self, plan: LoadPlan) -> None:
        """Goes by another plan for the same model."""
        self._can_swap = self._swaps and can_swap(self._model, plan)
        self.plan = plan if self._can_swap else plan.without(reshaped(self._model))

    def fetch_whole(self, names: Collection[str]) -> None:
        """From now on needs all of these tensors, as far as it needs anything of them."""
        whole = {n: Box.whole(self._shapes[n]) for n in names if n in self.plan.boxes}
        self.use(replace(self.plan, boxes=self.plan.boxes | whole))

    def stage(self, shards: Shards) -> None:
        """Keeps what was fetched, in place of what was kept before."""
        self._staged, self._next = shards, None

    def drop(self) -> None:
        """Lets go of what is staged."""
        self._staged = self._next = None

    def prepare(self, version: int) -> "Future[None]":
        """Does all that can be done of `load` while the engine runs. WeightsMismatch as there."""
        return self._thread.submit(self._prepare, version)

    def load(self, version: int) -> None:
        """Goes on with the staged weights; to be called between two steps.

        Raises WeightsMismatch where they aren't in place then: the model is not to be used.
        """
        assert self._staged is not None and self._staged.version == version, f"{version} isn't staged"
        shards, swap = self._staged, self._next
        self.drop()
        if swap is not None:
            swap.commit()
            self._thread.submit(swap.attributes.clear)  # the old weights; to free them takes longer
            return
        self._reload(
            (name, _spread(tensor, self.plan.boxes[name], self._shapes[name]))
            for name, tensor in shards.tensors.items()
        )
        if current_platform.is_cpu():
            for head in tied_heads(self._model):
                # A layer computes with a packed copy of its weight, and vLLM renews those only of layers
                # for which a tensor arrived.
                head.quant_method.process_weights_after_loading(head)
        self._check(shards)

    def _prepare(self, version: int) -> None:
        assert self._staged is not None and self._staged.version == version, f"{version} isn't staged"
        if self._can_swap:
            self._next = Swap.build(self._model, self.plan, self._staged.tensors)
            self._staged = replace(self._staged, tensors={})  # its publisher may use the memory again

    def _check(self, shards: Shards) -> None:
        """Of parameters that are as they were loaded; the others were told at the start."""
        for name, parameter in self._model.named_parameters():
            recipe = self.plan.parameters.get(name)
            if recipe is not None:
                check_parameter(parameter, recipe, self.plan.boxes, shards.tensors)


def tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    """The output layers that share their weight with an embedding."""
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    return [head for head in heads if any(head.weight is embedding.weight for embedding in embeddings)]


def _spread(tensor: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor with only a box of it filled: memory that is never touched is never taken."""
    if box.shape == shape:
        return tensor
    whole = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    whole[box.slices] = tensor
    return whole
