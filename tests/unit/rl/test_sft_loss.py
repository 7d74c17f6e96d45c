"""SFTLoss against cross-entropy written as a loop in float64."""

import torch

from forge.rl.loss import SFTLoss

N, T, V = 3, 4, 7


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(N, T)
    return {
        "logits": torch.randn(N, T, V, generator=generator, dtype=torch.float64) * 3,
        "target_ids": torch.randint(0, V, (N, T), generator=generator),
        "advantages": torch.tensor([[1.0, 2.0, 0.5, 1.0], [0.0, 1.0, 1.0, 3.0], [1.0] * 4]),
        "generator_logprobs": zeros,
        "loss_mask": torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool),
    }


def test_value_gradient_and_metrics_equal_weighted_cross_entropy() -> None:
    batch = make_batch()
    logits = batch["logits"].requires_grad_(True)
    nll, weighted, entropy = [], [], []
    for n in range(N):
        for t in range(T):
            if batch["loss_mask"][n, t]:
                p = logits[n, t].exp() / logits[n, t].exp().sum()
                nll.append(-p[batch["target_ids"][n, t]].log())
                weighted.append(batch["advantages"][n, t].double() * nll[-1])
                entropy.append(-(p * p.log()).sum())
    expected = torch.stack(weighted).sum() / 5
    [gradient] = torch.autograd.grad(expected, logits)
    loss, metrics = SFTLoss()(**batch)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=0)
    [got] = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, gradient, atol=1e-6, rtol=0)
    torch.testing.assert_close(metrics["nll"].double(), torch.stack(nll).mean(), atol=1e-6, rtol=0)
    torch.testing.assert_close(metrics["entropy"].double(), torch.stack(entropy).mean(), atol=1e-6, rtol=0)


def test_masked_places_may_hold_anything_and_one_weight_may_stand_for_a_row() -> None:
    batch = make_batch()
    clean, _ = SFTLoss()(**{**batch, "advantages": torch.tensor([1.0, 2.0, 1.0])})
    spread = torch.tensor([1.0, 2.0, 1.0])[:, None].expand(N, T).clone()
    spread[~batch["loss_mask"]] = float("nan")
    dirty = batch["logits"].clone()
    dirty[~batch["loss_mask"]] = float("nan")
    loss, _ = SFTLoss()(**{**batch, "logits": dirty, "advantages": spread})
    assert float(loss) == float(clean)


def test_it_is_normalized_by_tokens() -> None:
    assert SFTLoss().normalize_by == "tokens"
