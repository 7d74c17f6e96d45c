"""[4 -> 5] Work shared out evenly: over data-parallel ranks, and over the passes of one."""

import heapq
from collections import Counter
from collections.abc import Sequence

from forge.data_models import Episode

MAX_EXCESS = 1.1
"""Of the mean, that a rank may have to do before a group is cut for it."""


def fill_evenly(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Numbers of items -> bins, fullest first: the largest item goes first, each to the emptiest bin.

    The items of a bin are in ascending order. The fullest bin holds at most 4/3 times what it must in the
    best assignment (Graham, 1969).
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, number = loads[0]
        bins[number].append(item)
        heapq.heapreplace(loads, (load + sizes[item], number))
    bins.sort(key=lambda items: -sum(sizes[i] for i in items))
    return [sorted(items) for items in bins]


def balance(episodes: Sequence[Episode], dp_size: int) -> list[list[Episode]]:
    """Episodes -> those of each data-parallel rank, with about equal numbers of tokens to compute.

    A group stays on one rank, which computes its prompt once; only while a rank has a tenth more to do than
    the mean, or another nothing, episodes of its groups move to the rank with the least. Their order is
    kept. Needs an episode for each rank at least.
    """
    assert len(episodes) >= dp_size, f"{len(episodes)} episodes for {dp_size} ranks"
    groups: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        groups.setdefault(episode.group_id, []).append(i)
    members = list(groups.values())
    sizes = [_Share(episodes, group).num_tokens for group in members]
    shares = [
        _Share(episodes, [i for number in numbers for i in members[number]])
        for numbers in fill_evenly(sizes, dp_size)
    ]
    while _move_one(shares):
        pass
    return [[episodes[i] for i in numbers] for numbers in sorted(sorted(s.numbers) for s in shares)]


class _Share:
    """What one rank has to do."""

    def __init__(self, episodes: Sequence[Episode], numbers: Sequence[int]) -> None:
        self.numbers: set[int] = set()
        self.num_tokens = 0
        self._episodes = episodes
        self._of_group: Counter[str] = Counter()
        for number in numbers:
            self.add(number)

    def cost_of(self, number: int) -> int:
        """Tokens that the episode adds, or added: its prompt too where no other of its group is here."""
        episode = self._episodes[number]
        others = self._of_group[episode.group_id] - (number in self.numbers)
        prompt = episode.completion.prompt_ids
        num_prompt = 0 if others or prompt is None else len(prompt)
        return len(episode.completion.token_ids) + num_prompt

    def add(self, number: int) -> None:
        self.num_tokens += self.cost_of(number)
        self.numbers.add(number)
        self._of_group[self._episodes[number].group_id] += 1

    def remove(self, number: int) -> None:
        self.num_tokens -= self.cost_of(number)
        self.numbers.discard(number)
        self._of_group[self._episodes[number].group_id] -= 1


def _move_one(shares: list[_Share]) -> bool:
    """Moves the episode that lowers the longest share most; False when none need move, or would help."""
    longest = max((s for s in shares if len(s.numbers) > 1), key=lambda s: s.num_tokens, default=None)
    shortest = min(shares, key=lambda s: s.num_tokens)
    mean = sum(s.num_tokens for s in shares) / len(shares)
    if longest is None or (shortest.numbers and longest.num_tokens <= MAX_EXCESS * mean):
        return False

    def after(number: int) -> int:
        left = longest.num_tokens - longest.cost_of(number)
        return max(left, shortest.num_tokens + shortest.cost_of(number))

    best = min(sorted(longest.numbers), key=after)
    if after(best) >= longest.num_tokens:
        return False
    longest.remove(best)
    shortest.add(best)
    return True
