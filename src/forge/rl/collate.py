"""[4 -> 5] Episodes -> what the trainer reads: each prompt once a row, its completions behind it."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forge.data_models import Completion, Episode, TrainInputs, TrainTargets
from forge.errors import ForgeError

MAX_ROW_TOKENS = 2048
"""A longer group is laid over several rows, each with the prompt: a row goes through the model in one
pass, and must fit into memory with it."""


def collate(batches: Sequence[Sequence[Episode]]) -> tuple[list[TrainInputs], list[TrainTargets]]:
    """One list of episodes a data-parallel rank -> that rank's inputs and targets, in the same order.

    Raises ForgeError for what can't be trained on, among it episodes of which only some have ref_logprobs.
    """
    _check_references([e for episodes in batches for e in episodes])
    packed = [pack_episodes(episodes) for episodes in batches]
    return [inputs for inputs, _ in packed], [targets for _, targets in packed]


def pack_episodes(episodes: Sequence[Episode]) -> tuple[TrainInputs, TrainTargets]:
    """Episodes that stand together and belong to one group share a row; order is kept."""
    groups = [list(members) for _, members in groupby(episodes, key=lambda e: e.group_id)]
    inputs, targets = pack_completions([[e.completion for e in group] for group in groups])
    _check_references(episodes)
    ref_logprobs = None
    if episodes[0].ref_logprobs is not None:
        for e in episodes:
            _check_lengths(e.episode_id, e.completion, e.ref_logprobs)
        ref_logprobs = _pad([e.ref_logprobs for e in episodes if e.ref_logprobs is not None]).float()
    return inputs, TrainTargets(
        source_ids=targets.source_ids,
        target_ids=targets.target_ids,
        loss_mask=targets.loss_mask,
        advantages=_stack(advantages_of(episodes)),
        generator_logprobs=targets.generator_logprobs,
        ref_logprobs=ref_logprobs,
        temperature=targets.temperature,
        episode_ids=[e.episode_id for e in episodes],
        policy_versions=[e.policy_version for e in episodes],
    )


def advantages_of(episodes: Sequence[Episode]) -> list[float | Tensor]:
    """One number for each episode; where any has one per token, [T] float32 for each.

    Raises ForgeError for an advantage tensor whose length is not the completion's.
    """
    if any(isinstance(e.advantage, Tensor) for e in episodes):
        return [_token_advantages(e) for e in episodes]
    return [e.advantage for e in episodes]


def _token_advantages(episode: Episode) -> Tensor:
    size = len(episode.completion.token_ids)
    if not isinstance(episode.advantage, Tensor):
        return torch.full((size,), float(episode.advantage))
    if episode.advantage.shape != (size,):
        raise ForgeError(
            f"{episode.episode_id} has {size} tokens but advantages of shape "
            f"{list(episode.advantage.shape)}: give one for all, or one per token"
        )
    return episode.advantage.float()


def _stack(advantages: Sequence[float | Tensor]) -> Tensor:
    """[N], or [N, T] with zeros for padding."""
    by_token = [a for a in advantages if isinstance(a, Tensor)]
    return _pad(by_token) if by_token else torch.tensor(advantages, dtype=torch.float32)


def _check_references(episodes: Sequence[Episode]) -> None:
    with_reference = sum(e.ref_logprobs is not None for e in episodes)
    if with_reference not in (0, len(episodes)):
        raise ForgeError(
            f"episodes with and without ref_logprobs can't share a batch, got {with_reference} with and "
            f"{len(episodes) - with_reference} without: grade all or none"
        )


def pack_completions(
    groups: Sequence[Sequence[Completion]], max_row_tokens: int = MAX_ROW_TOKENS
) -> tuple[TrainInputs, TrainTargets]:
    """Groups of completions of one prompt each -> rows; targets stand in the order of the completions.

    Masks come from lengths alone, so that a padding id may equal an end token. Advantages are zero here.
    """
    rows = [row for group in groups for row in _split_group(group, max_row_tokens)]
    completions = [c for row in rows for c in row]
    temperatures = {c.temperature for c in completions}
    if len(temperatures) != 1:
        raise ForgeError(f"completions of one batch must share one temperature, got {sorted(temperatures)}")
    laid = [_lay_row(row) for row in rows]
    length = max(len(ids) for ids, *_ in laid)
    inputs = TrainInputs(
        input_ids=_pad([ids for ids, *_ in laid]),
        positions=_pad([positions for _, positions, *_ in laid]),
        segment_ids=_pad([segments for _, _, segments, _ in laid], value=-1),
    )
    sources = [source + row * length for row, (*_, row_sources) in enumerate(laid) for source in row_sources]
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    targets = TrainTargets(
        source_ids=_pad(sources),
        target_ids=_pad([c.token_ids for c in completions]),
        loss_mask=torch.arange(int(lengths.max()))[None] < lengths[:, None],
        advantages=torch.zeros(len(completions)),
        generator_logprobs=_pad([c.logprobs for c in completions]).float(),
        temperature=temperatures.pop(),
    )
    return inputs, targets


def _split_group(group: Sequence[Completion], max_row_tokens: int) -> list[list[Completion]]:
    """Greedy: a row takes completions while it stays within the limit (one completion always fits)."""
    prompt = _prompt_of(group[0])
    rows: list[list[Completion]] = []
    used = 0
    for completion in group:
        _check_lengths("completion", completion, completion.logprobs)
        if not torch.equal(_prompt_of(completion), prompt):
            raise ForgeError("completions of one group must share one prompt, token for token")
        size = len(completion.token_ids)
        if not rows or used + size > max_row_tokens:
            rows.append([])
            used = len(prompt)
        rows[-1].append(completion)
        used += size
    return rows


def _lay_row(row: Sequence[Completion]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Token ids, positions and segments of one row, and each completion's source columns."""
    prompt = _prompt_of(row[0])
    ids, positions, segments = (
        [prompt],
        [torch.arange(len(prompt))],
        [torch.zeros(len(prompt), dtype=torch.long)],
    )
    sources = []
    start = len(prompt)
    for segment, completion in enumerate(row, start=1):
        size = len(completion.token_ids)
        ids.append(completion.token_ids)
        positions.append(torch.arange(len(prompt), len(prompt) + size))
        segments.append(torch.full((size,), segment))
        # the prompt's last token predicts the first token, each token the next one
        sources.append(torch.cat([torch.tensor([len(prompt) - 1]), torch.arange(start, start + size - 1)]))
        start += size
    return torch.cat(ids), torch.cat(positions), torch.cat(segments), sources


def _prompt_of(completion: Completion) -> Tensor:
    if completion.prompt_ids is None or len(completion.prompt_ids) == 0:
        raise ForgeError(
            "a completion without prompt_ids can't be trained on: the generator must return them"
        )
    return completion.prompt_ids


def _check_lengths(name: str, completion: Completion, logprobs: Tensor | None) -> None:
    size = len(completion.token_ids)
    if size == 0:
        raise ForgeError(f"{name} has no tokens: an empty completion can't be trained on")
    if logprobs is None or len(logprobs) != size:
        got = None if logprobs is None else len(logprobs)
        raise ForgeError(f"{name} has {size} tokens but {got} log-probabilities")


def _pad(rows: Sequence[Tensor], value: int = 0) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
