"""[4] Episodes that bring no more memory along than is theirs."""

from dataclasses import replace

from torch import Tensor

from forge.data_models import Completion, Episode


def compact(episode: Episode) -> Episode:
    """The same without the rest of larger tensors that its own are slices of: pickling would write those."""
    if own := _own_tensors(episode.completion):
        episode = replace(episode, completion=replace(episode.completion, **own))
    own = _own_tensors(episode)
    return replace(episode, **own) if own else episode


def _own_tensors(data: Episode | Completion) -> dict[str, Tensor]:
    values = ((name, getattr(data, name)) for name in type(data).__slots__)
    return {
        name: value.detach().clone()
        for name, value in values
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    }
