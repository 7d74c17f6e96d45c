"""[3] What a paper has beside its loss: how it compares rewards, and which groups it trains on."""

from dataclasses import dataclass

from forge.rl.advantage import Baseline, Normalize
from forge.rl.loss.registry import LOSSES


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings beside a loss, as its paper has them.

    baseline, normalize: see `forge.rl.advantage.estimate`; "batch_std" also has the replay buffer whiten each
    batch. dynamic_sampling: a group whose rewards are all equal is replaced by another prompt's (DAPO, arXiv
    2503.14476, section 3.2). overlong: answers close to the longest allowed lose reward (section 3.4).
    """

    baseline: Baseline = "group_mean"
    normalize: Normalize = "group_std"
    dynamic_sampling: bool = False
    overlong: bool = False

    @property
    def compares(self) -> bool:
        """Whether it takes two completions of a prompt or more."""
        return self.baseline != "none" or self.dynamic_sampling


RECIPES = {
    "grpo": Recipe(),  # arXiv 2402.03300, section 4.1.2
    "dr_grpo": Recipe(normalize="none"),  # arXiv 2503.20783, section 3.2
    "dapo": Recipe(dynamic_sampling=True, overlong=True),  # arXiv 2503.14476
    "cispo": Recipe(dynamic_sampling=True, overlong=True),  # arXiv 2506.13585, section 3.1: those of DAPO
    "gspo": Recipe(),  # arXiv 2507.18071, eq. 6
    "gspo_token": Recipe(),
    "sapo": Recipe(),  # arXiv 2511.20347
    "reinforce": Recipe("none", "none"),
    "rloo": Recipe("leave_one_out", "none"),  # arXiv 2402.14740
    "reinforce_pp": Recipe("none", "batch_std"),  # arXiv 2501.03262
    "reinforce_pp_baseline": Recipe("group_mean", "batch_std"),
    "ppo": Recipe("none", "batch_std"),  # without a value function, the batch's mean is the baseline
}


def recipe_of(loss: str) -> Recipe:
    """The recipe of a loss by its name in the registry, or by the dotted path of a class there.

    Any other loss, a user's own too, gets GRPO's.
    """
    module, _, kind = loss.rpartition(".")
    if f"{module}.".startswith("forge.rl.loss."):
        of_class = (name for name, (known, preset) in LOSSES.items() if known.__name__ == kind and not preset)
        loss = next(of_class, loss)
    return RECIPES.get(loss, Recipe())
