"""What things cost in the simulated job: a cluster and a length distribution, from published runs.

The job is AReaL's (arXiv 2505.24298; posts v0.2 and v0.3 in github.com/inclusionAI/AReaL, blog):
R1-Distill-Qwen-1.5B learns mathematics, 512 questions of 16 answers a step, answers of up to 27 K tokens of
which under 5 % are cut, on 16 nodes of 8 H800. 1000 steps took 41.0 h synchronously, all 128 GPUs generating
and then all training, and 14.8 h asynchronously, 96 GPUs generating beside 32 that train: 147.6 s and 53.3 s
a step, 2.77 to 1.
"""

import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()

AREAL_SYNCHRONOUS_STEP_S, AREAL_STEP_S = 147.6, 53.3
AREAL_RATIO = 2.77


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of an answer: log-normal, cut at the context.

    The 99th percentile is ten times the median (Laminar, arXiv 2510.12633), and one answer in 25 is
    cut (AReaL v0.2: under 5 %). Those of a group are drawn independently, the worst case: half of all groups
    then have one that is cut.
    """

    max_tokens: int = 27_648
    cut: float = 0.04
    spread: float = math.log(10) / _NORMAL.inv_cdf(0.99)  # sigma

    @property
    def log_median(self) -> float:
        """mu"""
        return math.log(self.max_tokens) - self.spread * _NORMAL.inv_cdf(1 - self.cut)

    @property
    def mean(self) -> float:
        """E[min(X, max_tokens)], in closed form."""
        mu, sigma, top = self.log_median, self.spread, math.log(self.max_tokens)
        below = math.exp(mu + sigma**2 / 2) * _NORMAL.cdf((top - mu - sigma**2) / sigma)
        return below + self.max_tokens * (1 - _NORMAL.cdf((top - mu) / sigma))

    def draw(self, dice: Random) -> int:
        """One answer's."""
        return max(1, min(self.max_tokens, round(dice.lognormvariate(self.log_median, self.spread))))


@dataclass(frozen=True, slots=True)
class Costs:
    """A job on a cluster. Times in seconds."""

    num_generators: int = 256
    num_ranks: int = 64  # of the trainer
    group_size: int = 16
    groups_per_step: int = 512
    lengths: Lengths = Lengths()

    # A decoding step of b sequences takes step_s + b * sequence_s. Two equations: AReaL's synchronous step,
    # less 13.3 s of training on all GPUs and 3 s of transfer, is the time of 27,648 decoding steps of 64
    # sequences at first and 17 in the mean; its 96 generators made at least 8192 * 7301 tokens in 53.3 s,
    # with 256 sequences each at most. A roofline says about the same: 3 GB of weights, and 29 KB of keys and
    # values for each token of context, through 3.3 TB/s, beside 2 ms for what starts the kernels.
    step_s: float = 3.2e-3
    sequence_s: float = 0.073e-3
    max_sequences: int = 256  # that decode at a time on one generator; vLLM's default

    # 32 GPUs trained on 8192 * 7301 tokens in no more than 53.3 s.
    tokens_per_rank_s: float = 35_100.0

    # The way of the weights: under 3 s in a cluster of 1000 GPUs (AReaL v0.2); 213 GB take 4 s to be put into
    # place on 8 H800 (checkpoint-engine, GLM-4.5-Air), these 3 GB a tenth of a second.
    snapshot_s: float = 0.2  # the trainer stands still
    store_s: float = 1.5
    fetch_s: float = 1.5
    load_s: float = 0.3  # the generator stands still

    @property
    def batch_size(self) -> int:
        """Episodes of a step."""
        return self.groups_per_step * self.group_size

    @property
    def generation_capacity(self) -> float:
        """Episodes per second that all generators make with every place taken, whatever becomes of them."""
        tokens_per_s = self.max_sequences / (self.step_s + self.sequence_s * self.max_sequences)
        return self.num_generators * tokens_per_s / self.lengths.mean

    @property
    def training_capacity(self) -> float:
        """Episodes per second that the trainer takes when it always has a batch, shared out evenly."""
        return self.num_ranks * self.tokens_per_rank_s / self.lengths.mean

    @property
    def ideal(self) -> float:
        """Episodes per second that no schedule can exceed: of the slower side at its best."""
        return min(self.generation_capacity, self.training_capacity)
