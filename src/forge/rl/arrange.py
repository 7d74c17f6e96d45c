"""[4 -> 5] A set of episodes -> what the trainer reads, whatever order they came in."""

import re
from collections.abc import Sequence

from forge.data_models import Episode, TrainInputs, TrainTargets
from forge.errors import ConfigError
from forge.rl.balance import balance
from forge.rl.collate import collate

TrainBatch = tuple[list[TrainInputs], list[TrainTargets]]
"""Of each data-parallel rank, in their order."""

_DIGITS = re.compile(r"(\d+)")


def arrange(episodes: Sequence[Episode], dp_size: int = 1) -> TrainBatch:
    """Episodes -> those of each data-parallel rank, about equal numbers of tokens each (`balance`).

    The arrangement depends on which episodes they are, not on their order: with equal episodes, sums come out
    equal bit for bit.
    """
    return collate(balance(in_order(episodes), dp_size))


def arrange_minibatches(
    episodes: Sequence[Episode], dp_size: int = 1, minibatches: int = 1
) -> list[TrainBatch]:
    """The same for several updates: equal numbers of episodes each, groups whole as far as that goes."""
    check_minibatches(len(episodes), dp_size, minibatches)
    return [arrange(part, dp_size) for part in split(in_order(episodes), minibatches)]


def check_minibatches(num_episodes: int, dp_size: int, minibatches: int) -> None:
    """Raises ConfigError where so many episodes can't be split so, or some rank would get nothing."""
    if num_episodes % minibatches or num_episodes // minibatches < dp_size:
        raise ConfigError(
            f"{num_episodes} episodes can't be split into {minibatches} minibatches with an equal number of "
            f"episodes, one for each of {dp_size} data-parallel ranks at least"
        )


def in_order(episodes: Sequence[Episode]) -> list[Episode]:
    """By number: group "2" before group "10", and so within a group."""
    return sorted(episodes, key=lambda e: (_numbers_in(e.group_id), _numbers_in(e.episode_id)))


def split(episodes: Sequence[Episode], num_parts: int) -> list[list[Episode]]:
    """Parts of equal size: each group goes whole to the first part that has room for it; those that fit
    nowhere fill what is left."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    room = [len(episodes) // num_parts] * num_parts
    parts: list[list[Episode]] = [[] for _ in range(num_parts)]
    left_over: list[Episode] = []
    for members in groups.values():
        number = next((i for i in range(num_parts) if room[i] >= len(members)), None)
        if number is None:
            left_over += members
            continue
        parts[number] += members
        room[number] -= len(members)
    for part, num in zip(parts, room, strict=True):
        part += left_over[:num]
        del left_over[:num]
    return parts


def _numbers_in(name: str) -> list[str | int]:
    """Text and numbers, in turn: numbers compare as numbers.

    >>> _numbers_in("10/2")
    ['', 10, '/', 2, '']
    """
    return [int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(name))]
