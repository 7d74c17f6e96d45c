"""What the keys of a GRPO run make of loss, rewards and advantages, and what one rollout does with them."""

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from apps.grpo.algorithm import Algorithm, algorithm_of
from apps.grpo.algorithm_config import AlgorithmConfig
from apps.grpo.config import DEFAULT_CONFIG, GRPOConfig, load_config
from apps.grpo.machines import Machines, plan
from apps.grpo.main import rollout
from apps.grpo.teacher import check_teacher
from forge.data_models import Completion, Episode
from forge.errors import ConfigError
from forge.observability.metrics import drain
from forge.rl.advantage import estimate
from forge.rl.loss import DAPOLoss, GRPOLoss, GSPOLoss, PolicyLoss
from forge.rl.recipes import Recipe

IN_REWARD = ("--grpo.kl_in", "reward", "--grpo.normalize", "none")
PLAIN = ("--services.ref_model", "null")


def config_of(*argv: str) -> GRPOConfig:
    return load_config(list(argv)).config


def algorithm(*argv: str) -> Algorithm:
    return config_of(*argv).algorithm()


def test_a_loss_comes_with_its_papers_settings_and_recipe() -> None:
    assert algorithm().loss == GRPOLoss(beta=0.01, horizon=16)
    dapo = algorithm("--loss", "dapo", *PLAIN)
    assert dapo.loss == DAPOLoss(horizon=16) and dapo.beta == 0
    assert dapo.recipe == Recipe(dynamic_sampling=True, overlong=True)
    assert dapo.overlong_cache == 3  # a fifth of 16
    assert algorithm("--loss", "gspo", *PLAIN).overlong_cache == 0


def test_keys_of_the_run_win_over_the_loss_and_its_recipe() -> None:
    changed = algorithm(
        *("--loss", "{name: gspo, clip_low: 0.1, clip_high: 0.2, horizon: 7}", *PLAIN),
        *("--grpo.clip_low", "0.3", "--training.entropy_coef", "0.5", "--grpo.overlong_cache", "4"),
        *("--grpo.baseline", "leave_one_out", "--grpo.dynamic_sampling", "true"),
    )
    assert changed.loss == GSPOLoss(clip_low=0.3, clip_high=0.2, horizon=7, entropy_coef=0.5)
    assert changed.recipe == Recipe(baseline="leave_one_out", dynamic_sampling=True)
    assert changed.overlong_cache == 4


def test_the_loss_by_its_name_is_the_run_s_and_another_one_is_its_own(tmp_path: Path) -> None:
    user = tmp_path / "user.yaml"
    user.write_text(f"extends: {DEFAULT_CONFIG}\ngrpo: {{beta: 0.3, clip_low: 0.1}}\n")
    file = ("--config", str(user))
    assert algorithm("--loss", "grpo").loss == algorithm().loss
    assert algorithm(*file, "--loss", "grpo").loss == GRPOLoss(beta=0.3, clip_low=0.1, horizon=16)
    assert algorithm(*file, "--loss.clip_low", "0.4").loss == GRPOLoss(beta=0.3, clip_low=0.4, horizon=16)
    assert algorithm(*file, "--loss", "dapo").loss == DAPOLoss(horizon=16)
    assert algorithm(*file, "--loss", "sapo").beta == 0
    gspo = algorithm("--loss.clip_high", "5e-4", "--loss", "gspo").loss
    assert gspo == GSPOLoss(clip_high=5e-4, horizon=16)


def test_the_plan_tells_what_the_keys_leave_open() -> None:
    told = plan(config_of("--loss", "dapo", *PLAIN))
    assert "DAPOLoss(" in told and "clip_high=0.28" in told and "horizon=16" in told
    assert "baseline group_mean, normalize group_std, dynamic sampling on, overlong cache 3 of 16" in told
    assert "KL         none" in told and "trainer" in told
    told = plan(config_of("--loss", "rloo", "--grpo.kl_in", "reward", "--grpo.beta", "0.05"))
    assert "in the reward, beta 0.05" in told and "dynamic sampling off" in told


def test_a_student_at_hand_is_checked_though_its_teacher_is_not(tiny_llama: Path) -> None:
    argv = ("--model", str(tiny_llama), "--teacher", "a/b", "--loss", "reinforce")
    assert "trainer" in plan(config_of(*argv))
    with pytest.raises(ConfigError, match="seq_len|max_position"):
        plan(config_of(*argv, "--training.seq_len", "1000000"))


class WithKL:
    """A user's loss with a KL term of its own."""

    def __init__(self, beta: float = 0.2) -> None:
        self.beta = beta

    def __call__(self, *_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError


def test_a_users_kl_in_the_reward_is_none_in_the_loss() -> None:
    name = f"{__name__}.WithKL"
    for argv, beta in (([], 0.2), (["--grpo.beta", "0.3"], 0.3)):
        made = algorithm("--loss", name, *IN_REWARD, *argv)
        assert made.kl is not None and made.kl.beta == made.beta == beta
        assert isinstance(made.loss, WithKL) and made.loss.beta == 0


def test_a_kl_in_the_reward_is_none_in_the_loss() -> None:
    made = algorithm("--loss", "{name: dapo, adaptive_kl: true, kl_target: 0.02}", *IN_REWARD)
    assert made.kl is not None and (made.kl.beta, made.kl.target) == (0.1, 0.02)
    assert isinstance(made.loss, PolicyLoss) and (made.loss.beta, made.loss.kl_target) == (0.0, None)
    assert made.beta == 0.1  # so a reference model is needed
    other = algorithm("--loss", "sft", *IN_REWARD, "--grpo.beta", "0.3")  # knows no beta
    assert other.kl is not None and other.kl.beta == 0.3


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--loss", "dopo"], "did you mean dapo?"),
        (["--loss", "sapo", "--grpo.clip_low", "0.2"], "loss sapo has no argument clip_low"),
        (["--loss", "no_such_package.Loss"], "can't import no_such_package"),
        (
            ["--loss.correction", "{kind: cut}"],
            "loss.correction.kind must be one of decoupled, truncate, mask",
        ),
        (["--grpo.kl_in", "reward", "--grpo.beta", "0"], "grpo.kl_in reward needs the weight of the KL"),
        (
            ["--loss", "reinforce", "--grpo.normalize", "group_std"],
            "grpo.normalize group_std needs a baseline",
        ),
        (["--grpo.overlong_cache", "17"], "grpo.overlong_cache must lie in [0, max_tokens 16], got 17"),
        (
            ["--teacher", "a/b"],
            "teacher takes the place of the reference model, but the loss has a beta of 0.01",
        ),
        (["--grpo.kl_in", "reward"], "grpo.kl_in reward does not go with normalize group_std"),
        (["--loss={name: 3}", "--grpo.kl_in=reward"], "loss must be a name"),
        (
            ["--loss=dapo", "--grpo.baseline=none", "--grpo.normalize=none", "--grpo.n_samples=1"],
            "grpo.n_samples must be at least 2, got 1",
        ),
        (["--teacher", "a/b", "--loss", "gspo"], "set loss to gspo_token"),
        (["--teacher", "a/b", "--loss", "ppo", *PLAIN], "add services.ref_model, which takes its place"),
        (
            ["--teacher", "a/b", "--loss", "ppo", "--grpo.baseline", "group_mean"],
            "grpo.baseline is group_mean, but with a teacher nothing is learnt from rewards",
        ),
    ],
)
def test_what_can_not_be_is_said_before_anything_starts(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*argv)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def completion(length: int, logprob: float = -1.0) -> Completion:
    return Completion(
        "", torch.zeros(length, dtype=torch.long), torch.full((length,), logprob), prompt_ids=torch.ones(2)
    )


def test_rewards_lose_by_length_and_by_distance_from_the_reference() -> None:
    options = AlgorithmConfig(max_tokens=10, overlong_cache=4, kl_in="reward")
    made = algorithm_of({"name": "rloo", "beta": 0.1}, options)
    completions = [completion(6), completion(8), completion(10)]
    references: list[Tensor | None] = [torch.full((n,), -1.5) for n in (6, 8, 10)]
    # 0, 2 and 4 tokens into a cache of 4; 0.5 nats a token, times 0.1
    wanted = [1.0 - 0.3, 1.0 - 0.5 - 0.4, 0.0 - 1.0 - 0.5]
    assert made.shape([1.0, 1.0, 0.0], completions, references) == pytest.approx(wanted)
    assert algorithm_of("rloo", AlgorithmConfig()).shape([1.0], [completion(9)], [None]) == [1.0]


class Endpoint:
    """Stands for the endpoint of an actor: answers with what the function does, and keeps the arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls: list[tuple[Any, ...]] = []

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(args)
        return self.function(*args, **kwargs)

    route = call_one


def machines(config: GRPOConfig, rewards: list[float], reference: float | None = None) -> Any:
    """Actors that ask two completions a question, whose rewards are the next two of these."""
    left = iter(rewards)
    numbers = iter(range(100))
    made = config.algorithm()
    number = Endpoint(lambda _: next(numbers))
    ref_model = None
    if reference is not None:
        scores = Endpoint(
            lambda completions: [torch.full((len(c.token_ids),), reference) for c in completions]
        )
        ref_model = SimpleNamespace(logprobs=scores)
    m = SimpleNamespace(
        algorithm=made,
        checks=SimpleNamespace(group=lambda *_: True),
        buffer=SimpleNamespace(
            admit=number, restart=Endpoint(lambda _: next(numbers)), add=Endpoint(lambda *_: None)
        ),
        dataset=SimpleNamespace(
            sample=Endpoint(lambda number: {"request": f"question {number}", "target": "t"})
        ),
        policy=SimpleNamespace(generate=Endpoint(lambda _: [completion(2), completion(3)])),
        reward=SimpleNamespace(evaluate_response=Endpoint(lambda **_: next(left))),
        advantages=SimpleNamespace(
            compute=Endpoint(lambda shaped, _: estimate(shaped, made.recipe.baseline, made.recipe.normalize))
        ),
        ref_model=ref_model,
    )
    m.is_useful = partial(Machines.is_useful, cast(Machines, m))
    return m


def roll(config: GRPOConfig, m: Any) -> list[Episode]:
    asyncio.run(rollout(m, config))
    [episodes] = m.buffer.add.calls
    return list(episodes)


def test_dapo_asks_until_answers_differ_and_keeps_its_place() -> None:
    config = config_of("--loss", "dapo", *PLAIN)
    m = machines(config, [1, 1, 0, 0, 0, 1])
    episodes = roll(config, m)
    assert [graded for _, graded in m.advantages.compute.calls] == [[0, 1]]  # before they were shaped
    assert [e.reward for e in episodes] == [0, 1]
    assert m.policy.generate.calls == [("question 0",), ("question 1",), ("question 2",)]
    assert m.buffer.admit.calls == [(config.grpo.n_samples,)]
    assert m.buffer.restart.calls == [(0,), (1,)]
    assert [(e.episode_id, e.group_id) for e in episodes] == [("2/0", "2"), ("2/1", "2")]


def test_groups_that_are_given_up_count_as_equal_only_where_they_are() -> None:
    config = config_of("--loss", "dapo", *PLAIN)
    m = machines(config, [])
    drain()
    assert not m.is_useful(0, [], [1.0, 1.0])
    m.checks.group = lambda *_: False
    assert not m.is_useful(1, [], [1.0, 1.0]) and not m.is_useful(2, [], [0.0, 1.0])
    assert drain()["reward/zero_variance_groups"].total == 1


def test_without_dynamic_sampling_a_group_of_equals_is_trained_on() -> None:
    config = config_of("--loss", "rloo", *PLAIN)
    m = machines(config, [1, 1])
    assert [e.advantage for e in roll(config, m)] == [0, 0]
    assert m.buffer.restart.calls == []


@pytest.mark.parametrize("loss", ["reinforce", "dapo", "ppo", "gspo_token"])
def test_a_teacher_gives_each_token_its_advantage_whatever_the_rewards(loss: str) -> None:
    config = config_of("--loss", loss, "--teacher", "a/b")
    m = machines(config, [1, 1], reference=-0.25)
    episodes = roll(config, m)
    assert [e.advantage.tolist() for e in episodes if isinstance(e.advantage, Tensor)] == [
        [0.75] * 2,
        [0.75] * 3,
    ]
    assert m.advantages.compute.calls == [] and [e.reward for e in episodes] == [1, 1]
    assert m.buffer.restart.calls == []
    assert m.algorithm.recipe == Recipe("none", "none") and m.algorithm.overlong_cache == 0


def test_a_teacher_must_read_tokens_as_its_student_does(
    tiny_llama: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    check_teacher(tiny_qwen3, tiny_llama)
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    edit(other / "tokenizer.json", lambda tree: swap(tree["model"]["vocab"], 100, 101))
    with pytest.raises(ConfigError, match="2 of its 334 tokens are others there, the first is 100 "):
        check_teacher(other, tiny_llama)
    small = tmp_path / "small"
    shutil.copytree(tiny_llama, small)
    edit(small / "config.json", lambda tree: tree.update(vocab_size=500))
    with pytest.raises(ConfigError, match="has embeddings of 500 tokens, and .* may sample 512"):
        check_teacher(small, tiny_llama)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def swap(vocabulary: dict[str, int], a: int, b: int) -> None:
    names = {number: name for name, number in vocabulary.items()}
    vocabulary[names[a]], vocabulary[names[b]] = b, a
