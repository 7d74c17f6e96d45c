"""GRPOLoss against eq. 3 of arXiv 2402.03300, written as loops in float64."""

import math

import pytest
import torch

from forge.errors import ConfigError
from forge.rl.loss import GRPOLoss

N, T, V = 4, 5, 11


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 3, 1, 4]
    return {
        "logits": torch.randn(N, T, V, generator=generator, dtype=torch.float64) * 2,
        "target_ids": torch.randint(0, V, (N, T), generator=generator),
        "advantages": torch.tensor([1.3, -0.7, 0.0, -2.0], dtype=torch.float64),
        "generator_logprobs": -torch.rand(N, T, generator=generator, dtype=torch.float64) * 4,
        "loss_mask": torch.tensor([[t < n for t in range(T)] for n in lengths]),
        "ref_logprobs": -torch.rand(N, T, generator=generator, dtype=torch.float64) * 4,
    }


def by_the_paper(batch: dict[str, torch.Tensor], loss: GRPOLoss) -> torch.Tensor:
    rows, num_tokens = [], 0
    for n in range(N):
        terms = []
        for t in range(T):
            if not batch["loss_mask"][n, t]:
                continue
            lp = batch["logits"][n, t].log_softmax(-1)[batch["target_ids"][n, t]]
            ratio = torch.exp(lp - batch["generator_logprobs"][n, t])
            advantage = batch["advantages"][n]
            clipped = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
            term = -torch.min(ratio * advantage, clipped * advantage)
            d = batch["ref_logprobs"][n, t] - lp
            term = term + loss.beta * (torch.exp(d) - d - 1)
            p = batch["logits"][n, t].softmax(-1)
            term = term - loss.entropy_coef * -(p * p.log()).sum()
            terms.append(term)
        num_tokens += len(terms)
        rows.append(torch.stack(terms))
    if loss.agg_type == "token_mean":
        return torch.cat(rows).sum() / num_tokens
    if loss.agg_type == "sequence_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / (loss.horizon or T) for row in rows]).mean()


@pytest.mark.parametrize("agg_type", ["fixed_horizon", "token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "settings", [{}, {"beta": 0.0}, {"entropy_coef": 0.3, "horizon": 9}, {"clip_high": 0.05}]
)
def test_value_and_gradient_equal_the_paper_in_float64(agg_type: str, settings: dict[str, float]) -> None:
    loss = GRPOLoss(agg_type=agg_type, **settings)  # pyright: ignore[reportArgumentType]
    batch = make_batch()
    batch["logits"].requires_grad_(True)
    want = by_the_paper(batch, loss)
    [want_grad] = torch.autograd.grad(want, batch["logits"])
    got, metrics = loss(**batch)
    [got_grad] = torch.autograd.grad(got, batch["logits"])
    assert got.item() == pytest.approx(want.item(), abs=1e-6)
    torch.testing.assert_close(got_grad, want_grad, atol=1e-6, rtol=1e-5)
    assert all(math.isfinite(float(v)) for v in metrics.values())


def test_zero_advantages_give_no_policy_gradient() -> None:
    batch = make_batch()
    batch["advantages"].zero_()
    batch["logits"].requires_grad_(True)
    got, _ = GRPOLoss(beta=0.0)(**batch)
    [grad] = torch.autograd.grad(got, batch["logits"])
    assert grad.abs().max() == 0


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    batch = make_batch()
    logits = batch["logits"].requires_grad_(True)
    logprobs = logits.log_softmax(-1).gather(-1, batch["target_ids"][..., None])[..., 0]
    batch["generator_logprobs"] = logprobs.detach()
    got, metrics = GRPOLoss(beta=0.0, agg_type="token_mean")(**batch)
    reinforce = -(logprobs * batch["advantages"][:, None])[batch["loss_mask"]].mean()
    torch.testing.assert_close(
        torch.autograd.grad(got, logits)[0], torch.autograd.grad(reinforce, logits)[0], atol=1e-6, rtol=1e-5
    )
    assert float(metrics["ratio_mean"]) == pytest.approx(1, abs=1e-6)
    assert float(metrics["logprob_gap"]) == pytest.approx(0, abs=1e-6)


def test_garbage_under_the_mask_changes_nothing() -> None:
    clean, dirty = make_batch(), make_batch()
    off = ~dirty["loss_mask"]
    for key in ("generator_logprobs", "ref_logprobs"):
        dirty[key][off] = math.nan
    dirty["target_ids"][off] = 3
    want, got = GRPOLoss()(**clean), GRPOLoss()(**dirty)
    assert got[0].item() == want[0].item()
    assert {k: float(v) for k, v in got[1].items()} == {k: float(v) for k, v in want[1].items()}


def test_clip_fraction_counts_the_tokens_that_were_clipped() -> None:
    batch = make_batch()
    logprobs = batch["logits"].log_softmax(-1).gather(-1, batch["target_ids"][..., None])[..., 0]
    ratio = torch.exp(logprobs - batch["generator_logprobs"])[batch["loss_mask"]]
    outside = ((ratio < 0.8) | (ratio > 1.28)).double().mean().item()
    _, metrics = GRPOLoss()(**batch)
    assert float(metrics["clip_frac"]) == pytest.approx(outside, abs=1e-6)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_low must lie in \[0, 1\], got 1.5"):
        GRPOLoss(clip_low=1.5)
    with pytest.raises(ConfigError, match="must not be negative"):
        GRPOLoss(beta=-1)
    batch = make_batch()
    del batch["ref_logprobs"]
    with pytest.raises(ConfigError, match=r"grpo.beta is 0.1, but there are no reference"):
        GRPOLoss()(**batch)
