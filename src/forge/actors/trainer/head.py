"""The model's last layer: hidden states -> logits, or what losses read of them without the logits."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge.actors._titan import Linear
from forge.rl.loss.from_hidden import scores_of_hidden


class TokenHead(Linear):
    """The projection to the vocabulary, whose weight may be sharded over it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # `input` is torchtitan's name: its sharding rules refer to it, and they know of no other positional one.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, *, target_ids: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input [1, M, D] -> logits [1, M, V], a DTensor where the weight is one.

        With target_ids [1, M]: log-probabilities of the targets and entropies of softmax(logits /
        temperature), both [1, M] float32, in nats and differentiable. No [M, V] tensor is made then.
        """
        if target_ids is None:
            return super().forward(input)
        hidden, weight = input, self.weight
        group, offset = None, 0
        if isinstance(weight, DTensor):
            assert weight.placements == (Shard(0),), "the vocabulary must be sharded, or not at all"
            _, (offset, _) = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            group = weight.device_mesh.get_group()
            weight = weight.to_local()
        if isinstance(hidden, DTensor):  # the same everywhere; each process adds its part to the gradient
            hidden = hidden.to_local(grad_placements=[Partial()])
        logprobs, entropies = scores_of_hidden(hidden[0], weight, target_ids[0] - offset, temperature, group)
        return logprobs[None], entropies[None]


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """values [M, ...] at the M unmasked places -> [N, T, ...] with zeros elsewhere; differentiable."""
    places = loss_mask.flatten().nonzero().squeeze(1)
    if len(places) == loss_mask.numel():
        return values.view(*loss_mask.shape, *values.shape[1:])
    spread_out = values.new_zeros(loss_mask.numel(), *values.shape[1:])
    return spread_out.index_copy(0, places, values).view(*loss_mask.shape, *values.shape[1:])
