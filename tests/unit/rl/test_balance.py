"""Sharing out work, against every other way to do it."""

import itertools
import random

import torch

from forge.data_models import Completion, Episode
from forge.rl.balance import MAX_EXCESS, balance, fill_evenly


def _episodes(groups: list[tuple[int, list[int]]]) -> list[Episode]:
    """Groups of (tokens of the prompt, tokens of each completion)."""
    made = []
    for g, (num_prompt, lengths) in enumerate(groups):
        prompt = torch.zeros(num_prompt, dtype=torch.long)
        for i, n in enumerate(lengths):
            completion = Completion("", torch.zeros(n, dtype=torch.long), torch.zeros(n), prompt_ids=prompt)
            made.append(Episode(f"{g}.{i}", f"g{g}", completion, "", 0.0, 0.0))
    return made


def _num_tokens(share: list[Episode]) -> int:
    prompts = {e.group_id: e.completion.prompt_ids for e in share}
    return sum(len(p) for p in prompts.values() if p is not None) + sum(
        len(e.completion.token_ids) for e in share
    )


def _random_groups(rng: random.Random, num: int, size: int) -> list[tuple[int, list[int]]]:
    return [(rng.randint(1, 60), [rng.randint(1, 60) for _ in range(size)]) for _ in range(num)]


def test_bins_hold_each_item_once_and_are_at_most_a_third_fuller_than_they_must_be() -> None:
    rng = random.Random(0)
    for _ in range(100):
        sizes, m = [rng.randint(1, 30) for _ in range(rng.randint(1, 6))], rng.randint(1, 3)
        bins = fill_evenly(sizes, m)
        assert len(bins) == m and sorted(i for b in bins for i in b) == list(range(len(sizes)))
        loads = [sum(sizes[i] for i in b) for b in bins]
        assert loads == sorted(loads, reverse=True)
        best = min(
            max(sum(s for s, where in zip(sizes, way, strict=True) if where == b) for b in range(m))
            for way in itertools.product(range(m), repeat=len(sizes))
        )
        assert loads[0] <= (4 / 3 - 1 / (3 * m)) * best + 1e-9


def test_every_episode_goes_to_one_rank_and_shares_are_about_equal() -> None:
    rng = random.Random(0)
    for _ in range(50):
        dp_size, episodes = rng.randint(1, 5), _episodes(_random_groups(rng, rng.randint(1, 12), 8))
        shares = balance(episodes, dp_size)
        assert all(shares) and shares == balance(episodes, dp_size)
        assert sorted(e.episode_id for s in shares for e in s) == sorted(e.episode_id for e in episodes)
        order = [e.episode_id for e in episodes]
        assert all(ids == sorted(ids, key=order.index) for ids in ([e.episode_id for e in s] for s in shares))
        loads = [_num_tokens(share) for share in shares]
        # moving helps until the rest is less than an episode, with a prompt, can even out
        assert max(loads) <= max(MAX_EXCESS * sum(loads) / dp_size, min(loads) + 120)


def test_groups_stay_whole_where_they_can_be_shared_out_evenly() -> None:
    rng = random.Random(0)
    for _ in range(20):
        groups = _random_groups(rng, 4, 8)
        shares = balance(_episodes(groups * 3), 3)
        bins = fill_evenly([p + sum(c) for p, c in groups * 3], 3)
        loads = [sum(groups[i % 4][0] + sum(groups[i % 4][1]) for i in b) for b in bins]
        if max(loads) <= MAX_EXCESS * sum(loads) / 3:
            assert sorted(_num_tokens(s) for s in shares) == sorted(loads)
            owners = [{e.group_id for e in share} for share in shares]
            assert sum(map(len, owners)) == 12


def test_one_group_is_cut_for_two_ranks() -> None:
    shares = balance(_episodes([(10, [20, 20, 20, 20])]), 2)
    assert [len(share) for share in shares] == [2, 2]


def test_no_rank_is_left_without_an_episode() -> None:
    episodes = _episodes([(1, [1000]), (1, [1]), (1, [1])])
    assert all(balance(episodes, 3))
    assert all(balance(_episodes([(400, [1000]), (400, [600, 400])]), 3))
    assert all(balance(_episodes([(1, [900]), (1, [1, 1])]), 3))
