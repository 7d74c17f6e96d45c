"""The papers' formulas in float64, one answer and one token at a time, written from the papers alone.

Masked tokens do not exist here: an `Answer` has its own tokens only. A factor that a paper keeps out of the
gradient (sg[.]) is computed of `held`, the same policy as a constant. So there is nothing to detach, and the
finite differences of an oracle, with `held` where it was, are its gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.unit.rl.loss.batches import Batch

Numbers = list[Tensor]  # one float64 scalar per token


@dataclass(frozen=True, slots=True)
class Answer:
    """One sequence's unmasked tokens. Log-probabilities in nats."""

    new: Numbers  # log pi_theta
    held: Numbers  # the same, a constant
    old: Numbers  # log of what the ratio is over
    generator: Numbers
    proximal: Numbers | None
    ref: Numbers | None
    advantages: Numbers
    entropy: Numbers
    weight: Numbers  # of the surrogate: an off-policy correction's

    def __len__(self) -> int:
        return len(self.new)


Surrogate = Callable[[Answer, int], Tensor]  # what an answer's token adds to the loss, to be minimised


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[V] -> [V]: z_v / temperature minus the log of the sum of exp of all."""
    scaled = logits.double() / temperature
    shifted = scaled - scaled.max().detach()
    return shifted - shifted.exp().sum().log()


def logprob(logits: Tensor, token: int, temperature: float = 1.0) -> Tensor:
    return log_softmax(logits, temperature)[token]


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """-sum_v p_v log p_v, in nats."""
    terms = [-log_p.exp() * log_p for log_p in log_softmax(logits, temperature)]
    return torch.stack(terms).sum()


def read(batch: Batch, logits: Tensor, held: Tensor) -> list[Answer]:
    """The batch's answers that have a token. The ratio is over the generator."""
    answers = []
    for i, mask in enumerate(batch.loss_mask):
        places = [t for t, unmasked in enumerate(mask) if unmasked]
        if not places:
            continue

        def pick(values: Tensor | None, i: int = i, places: Sequence[int] = tuple(places)) -> Numbers:
            assert values is not None
            return [(values[i] if values.dim() == 1 else values[i, t]).double() for t in places]

        tokens = [(t, int(batch.target_ids[i, t])) for t in places]
        answers.append(
            Answer(
                new=[logprob(logits[i, t], token) for t, token in tokens],
                held=[logprob(held[i, t], token).detach() for t, token in tokens],
                old=pick(batch.generator_logprobs),
                generator=pick(batch.generator_logprobs),
                proximal=None if batch.proximal_logprobs is None else pick(batch.proximal_logprobs),
                ref=None if batch.ref_logprobs is None else pick(batch.ref_logprobs),
                advantages=pick(batch.advantages),
                entropy=[entropy(logits[i, t]) for t in places],
                weight=[torch.ones((), dtype=torch.float64)] * len(places),
            )
        )
    return answers


# Means


def token_mean(answers: Sequence[Numbers], horizon: int) -> Tensor:
    """DAPO eq. 8: 1 / sum_i |o_i| sum_i sum_t."""
    return sum(value for answer in answers for value in answer) / sum(len(answer) for answer in answers)


def sequence_mean(answers: Sequence[Numbers], horizon: int) -> Tensor:
    """GRPO eq. 3: 1/G sum_i 1/|o_i| sum_t."""
    return sum(sum(answer) / len(answer) for answer in answers) / len(answers)


def fixed_horizon(answers: Sequence[Numbers], horizon: int) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): an answer's sum divided by a constant length."""
    return sum(sum(answer) / horizon for answer in answers) / len(answers)


MEANS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "fixed_horizon": fixed_horizon}


# KL estimators (J. Schulman, "Approximating KL divergence", 2020) of samples of pi, against ref


def k1(new: Tensor, ref: Tensor) -> Tensor:
    return new - ref


def k2(new: Tensor, ref: Tensor) -> Tensor:
    return (new - ref) ** 2 / 2


def k3(new: Tensor, ref: Tensor) -> Tensor:
    """GRPO eq. 4: pi_ref / pi - log(pi_ref / pi) - 1."""
    r = (ref - new).exp()
    return r - r.log() - 1


KL = {"k1": k1, "k2": k2, "k3": k3}


def next_beta(beta: float, kl: float, target: float) -> float:
    """Ziegler et al. (arXiv 1909.08593), section 2.2: a proportional controller in log space."""
    error = min(max((kl - target) / target, -0.2), 0.2)
    return beta * (1 + 0.1 * error)


# Surrogates


def ratio(answer: Answer, t: int) -> Tensor:
    return (answer.new[t] - answer.old[t]).exp()


def clip(value: Tensor, low: float, high: float) -> Tensor:
    """A constant, outside of [low, high]."""
    if value < low:
        return torch.tensor(low, dtype=torch.float64)
    if value > high:
        return torch.tensor(high, dtype=torch.float64)
    return value


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return a if a < b else b


def clipped(r: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO eq. 7 (arXiv 1707.06347): min(r A, clip(r, 1 - low, 1 + high) A); DAPO eq. 8 has two clips."""
    return smaller(r * advantage, clip(r, 1 - low, 1 + high) * advantage)


def ppo(low: float, high: float, dual: float | None = None) -> Surrogate:
    """PPO eq. 7, GRPO eq. 3, DAPO eq. 8; `dual`: arXiv 1912.09729, max(., c A) where A < 0."""

    def surrogate(answer: Answer, t: int) -> Tensor:
        a = answer.advantages[t]
        gain = clipped(ratio(answer, t), a, low, high)
        if dual is not None and a < 0 and gain < dual * a:
            gain = dual * a
        return -gain

    return surrogate


def cispo(low: float | None, high: float) -> Surrogate:
    """MiniMax-M1 (arXiv 2506.13585) eq. 4-5: sg(clip(r)) A log pi."""

    def surrogate(answer: Answer, t: int) -> Tensor:
        r = (answer.held[t] - answer.old[t]).exp()
        bounded = clip(r, 0.0 if low is None else 1 - low, 1 + high)
        return -bounded * answer.advantages[t] * answer.new[t]

    return surrogate


def gspo(low: float, high: float) -> Surrogate:
    """GSPO (arXiv 2507.18071) eq. 5 and 7: s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) for all of y_i."""

    def surrogate(answer: Answer, t: int) -> Tensor:
        s = ((sum(answer.new) - sum(answer.old)) / len(answer)).exp()
        return -clipped(s, answer.advantages[t], low, high)

    return surrogate


def gspo_token(low: float, high: float) -> Surrogate:
    """GSPO eq. 13-14: s_it = sg[s_i] pi(y_it) / sg[pi(y_it)]."""

    def surrogate(answer: Answer, t: int) -> Tensor:
        s = ((sum(answer.held) - sum(answer.old)) / len(answer)).exp()
        s_t = s * answer.new[t].exp() / answer.held[t].exp()
        return -clipped(s_t, answer.advantages[t], low, high)

    return surrogate


def sapo(tau_pos: float, tau_neg: float) -> Surrogate:
    """SAPO (arXiv 2511.20347): sigmoid(tau (r - 1)) 4 / tau A, tau by the sign of A."""

    def surrogate(answer: Answer, t: int) -> Tensor:
        a = answer.advantages[t]
        tau = tau_pos if a > 0 else tau_neg
        gate = 4 / tau / (1 + (-tau * (ratio(answer, t) - 1)).exp())
        return -gate * a

    return surrogate


def reinforce(answer: Answer, t: int) -> Tensor:
    """The policy gradient's surrogate by importance sampling: pi / pi_old A (PPO eq. 6, "conservative")."""
    return -ratio(answer, t) * answer.advantages[t]


def score(answer: Answer, t: int) -> Tensor:
    """REINFORCE itself (Williams 1992): its gradient is -A grad log pi."""
    return -answer.advantages[t] * answer.new[t]


# Off-policy corrections


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights pi_prox / pi_generator: as they are (decoupled PPO, arXiv 2110.00641; AReaL, arXiv
    2505.24298), at most `cap` (truncated importance sampling), or 0 outside [low, high] (IcePop)."""

    kind: str
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0
    level: str = "token"

    def apply(self, answer: Answer) -> Answer:
        proximal = answer.held if answer.proximal is None else answer.proximal
        log_rho = [p - g for p, g in zip(proximal, answer.generator, strict=True)]
        if self.level == "sequence":
            log_rho = [sum(log_rho)] * len(log_rho)
        return replace(answer, old=proximal, weight=[self._weight(x.exp()) for x in log_rho])

    def _weight(self, rho: Tensor) -> Tensor:
        if self.kind == "truncate":
            return rho if rho < self.cap else torch.full_like(rho, self.cap)
        if self.kind == "mask":
            return rho if self.low <= rho <= self.high else torch.zeros_like(rho)
        return rho


def total(
    answers: Sequence[Answer],
    surrogate: Surrogate,
    mean: str,
    horizon: int,
    *,
    beta: float = 0.0,
    kl_kind: str = "k3",
    entropy_coef: float = 0.0,
    correction: Correction | None = None,
) -> Tensor:
    """mean of (weight surrogate) + beta mean of KL - entropy_coef mean of entropy."""
    if correction is not None:
        answers = [correction.apply(answer) for answer in answers]

    def average(of: Surrogate) -> Tensor:
        return MEANS[mean]([[of(answer, t) for t in range(len(answer))] for answer in answers], horizon)

    loss = average(lambda answer, t: answer.weight[t] * surrogate(answer, t))
    if beta:
        loss = loss + beta * average(lambda answer, t: KL[kl_kind](answer.new[t], answer.ref[t]))
    if entropy_coef:
        loss = loss - entropy_coef * average(lambda answer, t: answer.entropy[t])
    return loss
