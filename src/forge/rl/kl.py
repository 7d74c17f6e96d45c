"""The weight of a KL penalty that follows the KL it measures; the same rule in a loss and in a reward."""

MAX_ERROR = 0.2
"""Of the target, that one step answers to, however far the KL is off."""

GAIN = 0.1


def next_coefficient(beta: float, kl: float, target: float) -> float:
    """The weight for the next step: higher after a KL above the target, lower after one below it.

    beta * (1 + 0.1 * clip((kl - target) / target, -0.2, 0.2)), section 2.2 of arXiv 1909.08593: at most 2 %
    a step. `kl` and `target` > 0 in the same unit (here nats per token); needs beta > 0, as 0 stays 0.
    """
    error = (kl - target) / target
    return beta * (1 + GAIN * min(max(error, -MAX_ERROR), MAX_ERROR))
