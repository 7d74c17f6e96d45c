"""The algorithm of a run as its keys ask for it: the loss, and what the paper of that has beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from torch import Tensor

from apps.grpo.algorithm_config import AlgorithmConfig
from forge.data_models import Completion, TrainTargets
from forge.errors import ConfigError
from forge.rl.advantage import check_estimate
from forge.rl.loss.registry import arguments_of, loss_class, make_loss, name_and_arguments
from forge.rl.recipes import Recipe, recipe_of
from forge.rl.shaping import KLReward, overlong_penalty

NO_KL = {"beta": 0.0, "kl_target": None, "adaptive_kl": False}
"""Arguments of a loss that has no KL term."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the keys of a run come to."""

    loss: Callable[..., Any]
    recipe: Recipe
    max_tokens: int  # of a completion
    overlong_cache: int  # 0: completions may be as long as they like
    kl: KLReward | None  # None: there is no KL in the reward

    @property
    def beta(self) -> float:
        """Weight of the KL term, wherever it stands; a reference model is needed when it is above 0."""
        return self.kl.beta if self.kl is not None else getattr(self.loss, "beta", 0.0)

    def shape(
        self, rewards: Sequence[float], completions: Sequence[Completion], references: Sequence[Tensor | None]
    ) -> list[float]:
        """The rewards less what too long a completion, or one far from the reference, costs."""
        shaped = list(rewards)
        for i, (completion, reference) in enumerate(zip(completions, references, strict=True)):
            if self.overlong_cache > 0:
                length = len(completion.token_ids)
                shaped[i] += overlong_penalty(length, self.max_tokens, self.overlong_cache)
            if self.kl is not None and reference is not None:
                shaped[i] = self.kl(shaped[i], completion.logprobs, reference)
        return shaped

    def described(self) -> str:
        """What all the keys come to, for people."""
        recipe, place = self.recipe, "loss" if self.kl is None else "reward"
        loss = repr(self.loss) if is_dataclass(self.loss) else type(self.loss).__name__
        sampling = "on" if recipe.dynamic_sampling else "off"
        return (
            f"loss       {getattr(self.loss, '__name__', loss)}\n"
            f"recipe     baseline {recipe.baseline}, normalize {recipe.normalize}, "
            f"dynamic sampling {sampling}, overlong cache {self.overlong_cache} of {self.max_tokens} tokens\n"
            f"KL         " + (f"in the {place}, beta {self.beta}" if self.beta > 0 else "none")
        )

    def after_step(self, targets: Sequence[TrainTargets]) -> None:
        """The weight of the KL in the reward follows that of the step's batch."""
        if self.kl is not None:
            self.kl.after_step(targets)

    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step, beside the state of the loss, which the trainer has."""
        return {} if self.kl is None else self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        if self.kl is not None:
            self.kl.load_state_dict(state)


def algorithm_of(
    loss: str | Mapping[str, Any], options: AlgorithmConfig, *, has_teacher: bool = False
) -> Algorithm:
    """What these keys come to; with a teacher nothing is made of the rewards.

    Raises ConfigError for what the loss can't take, or can't be together.
    """
    name, arguments = name_and_arguments(loss)
    kl = None
    if options.kl_in == "reward":
        kl, arguments = _kl_reward(name, arguments)
    made = make_loss({"name": name, **arguments}, horizon=options.max_tokens)
    recipe = Recipe("none", "none") if has_teacher else _recipe(name, options)
    cache = options.overlong_cache
    if cache is None:
        cache = max(options.max_tokens // 5, 1) if recipe.overlong else 0
    return Algorithm(made, recipe, options.max_tokens, cache, kl)


def _kl_reward(name: str, arguments: dict[str, Any]) -> tuple[KLReward, dict[str, Any]]:
    """The KL term of a loss for the reward, and the loss's arguments without it; a loss need not know one."""
    known = arguments_of(loss_class(name))
    beta, target = arguments.get("beta", 0.0), None
    if "beta" in known:
        made = make_loss({"name": name, **arguments})
        beta, target = getattr(made, "beta", beta), getattr(made, "kl_target", None)
    if not isinstance(beta, int | float) or not beta > 0:
        raise ConfigError(
            f"grpo.kl_in reward needs the weight of the KL, got {beta!r}: set grpo.beta above 0"
        )
    rest = {key: value for key, value in arguments.items() if key not in NO_KL}
    return KLReward(beta, target), rest | {key: value for key, value in NO_KL.items() if key in known}


def _recipe(name: str, options: AlgorithmConfig) -> Recipe:
    names = ("baseline", "normalize", "dynamic_sampling")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    recipe = replace(recipe_of(name), **chosen)
    try:
        check_estimate(recipe.baseline, recipe.normalize)
    except ConfigError as error:  # translated: it does not know the section
        raise ConfigError(f"grpo.{error}") from error
    if options.kl_in == "reward" and recipe.normalize == "group_std":
        raise ConfigError(
            "grpo.kl_in reward does not go with normalize group_std: where all rewards of a group are equal, "
            "noise in the KL would be divided by its own deviation; set grpo.normalize to none, or loss to "
            "rloo"
        )
    return recipe
