"""The head: log-probabilities and entropies without logits, against the plain formula in float64."""

import pytest
import torch
from torch import Tensor, nn

from forge.actors.trainer.head import TokenHead, spread
from forge.rl.loss import from_hidden
from forge.rl.loss.logprobs import compute_logprobs_and_entropy

DIM, VOCAB, TOKENS = 16, 300, 7


def _made(dtype: torch.dtype = torch.float32) -> tuple[TokenHead, Tensor, Tensor]:
    torch.manual_seed(0)
    module = TokenHead(TokenHead.Config(in_features=DIM, out_features=VOCAB))
    nn.init.normal_(module.weight)
    hidden = torch.randn(1, TOKENS, DIM).to(dtype).requires_grad_()
    return module, hidden, torch.randint(VOCAB, (1, TOKENS))


def _plainly(hidden: Tensor, weight: Tensor, target_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(-1, target_ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [(3, 128), (512, 1024)], ids=["tiles", "at once"])
@pytest.mark.parametrize(
    "factors", [(1.0, 1.0), (1.0, None), (None, 1.0)], ids=["both", "logprobs", "entropies"]
)
def test_values_and_gradients_equal_the_plain_formula(
    temperature: float,
    tile: tuple[int, int],
    factors: tuple[float | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(from_hidden, "CPU_TILE", tile)
    module, hidden, target_ids = _made()
    weights = torch.randn(2, 1, TOKENS)
    exact = [x.detach().double().requires_grad_() for x in (hidden, module.weight)]
    got = module(hidden, target_ids=target_ids, temperature=temperature)
    want = _plainly(exact[0], exact[1], target_ids, temperature)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).abs().max() < 1e-5

    def gradients(values: tuple[Tensor, Tensor], of: list[Tensor]) -> tuple[Tensor, ...]:
        terms = [(w * v).sum() * f for w, v, f in zip(weights, values, factors, strict=True) if f is not None]
        return torch.autograd.grad(torch.stack(terms).sum(), of)

    grads, expected = gradients(got, [hidden, module.weight]), gradients(want, exact)
    for mine, theirs in zip(grads, expected, strict=True):
        assert (mine - theirs).abs().max() < 2e-5


def test_logits_are_given_where_no_targets_are() -> None:
    module, hidden, target_ids = _made()
    logits = module(hidden)
    assert torch.equal(logits, hidden @ module.weight.T)
    for mine, theirs in zip(
        module(hidden, target_ids=target_ids, temperature=2.0),
        compute_logprobs_and_entropy(logits[0], target_ids[0], 2.0),
        strict=True,
    ):
        assert (mine[0] - theirs).abs().max() < 1e-5


def test_under_autocast_products_are_rounded_and_the_gradient_of_the_weight_stays_float32() -> None:
    module, hidden, target_ids = _made()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = module(hidden, target_ids=target_ids)
        rounded = module(hidden).detach()
    want, _ = compute_logprobs_and_entropy(rounded[0], target_ids[0])
    assert rounded.dtype == torch.bfloat16
    assert (logprobs[0] - want).abs().max() < 1e-5  # of the same rounded logits, but exact from there
    logprobs.sum().backward()
    (exact,) = torch.autograd.grad(_plainly(hidden, module.weight, target_ids, 1.0)[0].sum(), module.weight)
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    assert (module.weight.grad - exact).norm() < 0.02 * exact.norm()


def test_values_return_to_their_unmasked_places() -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert spread(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[1, 0, 2], [0, 3, 0]]
    assert spread(torch.ones(6, 2), torch.ones(2, 3, dtype=torch.bool)).shape == (2, 3, 2)
