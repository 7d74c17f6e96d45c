"""What no single group shows, at the edges of its window."""

import torch

from forge.data_models import Completion
from forge.rl.checks.trends import WINDOW, Truncation


def completion(stop_reason: str) -> Completion:
    return Completion("", torch.zeros(1, dtype=torch.long), torch.zeros(1), stop_reason=stop_reason)


def test_the_group_that_fills_the_window_may_have_no_cut_completion() -> None:
    check = Truncation(0.95, max_tokens=16)
    assert check.see(["0/0"] * (WINDOW - 2), [completion("length")] * (WINDOW - 2)) is None
    found = check.see(["1/0", "1/1"], [completion("stop")] * 2)
    assert found is not None and found.episode_ids == ("1/0", "1/1")
    assert "99.6% of the last 512 were" in found.seen
