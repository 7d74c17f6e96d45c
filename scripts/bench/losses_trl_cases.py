"""What losses_vs_trl compares: TRL's settings, ours, and where the two are not the same, why."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from losses_trl_ours import (
    BETA,
    ENTROPY_COEF,
    GRPO,
    LENGTH,
    Batch,
    Result,
    advantages,
    by_sample_std,
    by_sample_std_of_batch,
    by_std_of_rewards,
    op,
    penalised,
    whitened,
    with_empty_sequences,
    with_entropy_of_tokens,
    with_ratio_on_kl,
    with_sequences_as_actions,
)

from forge.rl.loss.ops import compute_entropy, compute_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that both have."""

    name: str
    side: Literal["grpo", "rloo", "sft", "ops"] = "grpo"  # which of TRL's trainers
    trl: dict[str, Any] = field(default_factory=dict)  # its settings
    ours: dict[str, Any] = field(default_factory=dict)  # the loss
    compute: Callable[[Batch], Result] | None = None  # what is not a loss
    batch: str = "off_policy"
    compare: tuple[str, ...] = ("value", "gradient")
    note: str = ""  # where they are not the same: why
    undo: Callable[[Batch, Result], Result] | None = None  # ours with what the note says made as TRL has it


def loss(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "beta": 0.0, **arguments}


K3: dict[str, Any] = {"beta": BETA, "use_bias_correction_kl": False}

SEQUENCES: dict[str, Any] = {"agg_type": "sequence_mean"}
HIGHER: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}


def vllm(mode: str, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """TRL's settings of a correction."""
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }


OPS = [
    Case(
        name="log-probabilities",
        side="ops",
        trl={"op": "logprobs", "temperature": 1.0},
        compute=op(lambda logits, batch: compute_logprobs(logits, batch["ids"])),
    ),
    Case(
        name="log-probabilities, temperature",
        side="ops",
        trl={"op": "logprobs", "temperature": 0.7},
        compute=op(lambda logits, batch: compute_logprobs(logits, batch["ids"], 0.7)),
    ),
    Case(
        name="entropy",
        side="ops",
        trl={"op": "entropy"},
        compute=op(lambda logits, _: compute_entropy(logits)),
    ),
]

LOSSES = [
    Case(name="SFT", side="sft", ours={"name": "sft"}),
    Case(name="GRPO", trl={"loss_type": "grpo", "epsilon": 0.2}, ours=GRPO),
    Case(name="GRPO, clip-higher", trl={"loss_type": "grpo", **HIGHER}, ours=GRPO | {"clip_high": 0.28}),
    Case(
        name="GRPO, k3 KL in the loss",
        trl={"loss_type": "grpo", "epsilon": 0.2, **K3},
        ours=GRPO | {"beta": BETA},
    ),
    Case(
        name="GRPO, unbiased KL in the loss, on policy",
        trl={"loss_type": "grpo", "epsilon": 0.2, "beta": BETA},
        ours=GRPO | {"kl_kind": "k2", "beta": BETA},
        batch="on_policy",
        compare=("gradient",),
    ),
    Case(
        name="GRPO, unbiased KL in the loss, off policy",
        trl={"loss_type": "grpo", "epsilon": 0.2, "beta": BETA},
        ours=GRPO | {"kl_kind": "k2", "beta": BETA},
        note="TRL multiplies k3 by the ratio (DeepSeek-V3.2, arXiv 2512.02556), whose gradient is the ratio "
        "times that of k2: on policy it is our kl_kind k2, off policy ours has no such factor, as eq. 4 of "
        "arXiv 2402.03300 has none",
        undo=with_ratio_on_kl,
    ),
    Case(
        name="GRPO, entropy bonus",
        trl={"loss_type": "grpo", "epsilon": 0.2, "entropy_coef": ENTROPY_COEF},
        ours=GRPO | {"entropy_coef": ENTROPY_COEF},
        note="TRL's bonus is the mean entropy of all tokens whatever the loss, ours is averaged as the loss "
        "is, so that it weighs against it the same in short and long sequences",
        undo=with_entropy_of_tokens,
    ),
    Case(
        name="GRPO, two-sided (dual clip)",
        trl={"loss_type": "grpo", "epsilon": 0.2, "delta": 1.5},
        ours=loss("ppo", dual_clip=1.5, **SEQUENCES),
    ),
    Case(
        name="GRPO, a sequence masked whole",
        trl={"loss_type": "grpo", "epsilon": 0.2},
        ours=GRPO,
        batch="empty",
        note="TRL counts a sequence without a token that counts as one more whose loss is 0; eq. 3 of arXiv "
        "2402.03300 divides by |o_i|, so it has no such sequence: ours leaves it out of the mean",
        undo=with_empty_sequences,
    ),
    Case(name="PPO", trl={"loss_type": "bnpo", "epsilon": 0.2}, ours=loss("ppo")),
    Case(name="BNPO", trl={"loss_type": "bnpo", **HIGHER}, ours=loss("grpo", agg_type="token_mean")),
    Case(
        name="Dr. GRPO",
        trl={"loss_type": "dr_grpo", "epsilon": 0.2},
        ours=loss("dr_grpo", horizon=LENGTH),
    ),
    Case(name="DAPO", trl={"loss_type": "dapo", **HIGHER}, ours={"name": "dapo"}),
    Case(
        name="DAPO, k3 KL, entropy bonus",
        trl={"loss_type": "dapo", **HIGHER, **K3, "entropy_coef": ENTROPY_COEF},
        ours=loss("dapo", entropy_coef=ENTROPY_COEF) | {"beta": BETA},
    ),
    Case(name="CISPO", trl={"loss_type": "cispo", "epsilon_high": 1.2}, ours=loss("cispo", clip_high=0.2)),
    Case(
        name="GSPO, its paper's clips",
        trl={
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        ours=loss("gspo"),
        batch="near",
    ),
    Case(
        name="GSPO-token, its paper's clips",
        trl={
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        ours=loss("gspo_token"),
        batch="near",
    ),
    Case(
        name="GSPO, far off policy",
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
        ours=loss("gspo", clip_low=0.1, clip_high=0.1),
    ),
    Case(name="SAPO", trl={"loss_type": "sapo"}, ours=loss("sapo")),
    Case(
        name="RLOO, on policy",
        side="rloo",
        trl={"beta": 0.0},
        ours=loss("rloo", agg_type="fixed_horizon", horizon=1),
        batch="on_policy",
        compare=("gradient",),
    ),
    Case(
        name="RLOO, off policy",
        side="rloo",
        trl={"epsilon": 0.2, "beta": 0.0},
        ours=loss("rloo", agg_type="fixed_horizon", horizon=1),
        batch="whole",
        note="RLOO is on policy in its paper (arXiv 2402.14740). Off policy TRL takes the whole sequence for "
        "one action, with the product of its tokens' ratios, clipped as PPO does; ours weighs each token by "
        "its own ratio, whose variance does not grow with the length (a clipped ratio of sequences is gspo)",
        undo=with_sequences_as_actions,
    ),
]

CORRECTIONS = [
    Case(
        name="decoupled PPO, token",
        trl={"loss_type": "dapo", **HIGHER, **vllm("token_truncate", high=1e9)},
        ours=loss("dapo", correction={"kind": "decoupled"}),
    ),
    Case(
        name="truncated importance sampling, token",
        trl={"loss_type": "dapo", **HIGHER, **vllm("token_truncate", high=1.3)},
        ours=loss("dapo", correction={"kind": "truncate", "cap": 1.3}),
    ),
    Case(
        name="truncated importance sampling, sequence",
        trl={"loss_type": "dapo", **HIGHER, **vllm("sequence_truncate", high=1.3)},
        ours=loss("dapo", correction={"kind": "truncate", "cap": 1.3, "level": "sequence"}),
    ),
    Case(
        name="masked importance sampling, token",
        trl={"loss_type": "dapo", **HIGHER, **vllm("token_mask", 0.7, 1.4)},
        ours=loss("dapo", correction={"kind": "mask", "low": 0.7, "high": 1.4}),
    ),
    Case(
        name="masked importance sampling, sequence",
        trl={"loss_type": "dapo", **HIGHER, **vllm("sequence_mask", 0.5, 2.0)},
        ours=loss("dapo", correction={"kind": "mask", "low": 0.5, "high": 2.0, "level": "sequence"}),
    ),
    Case(
        name="truncated, with k3 KL in the loss",
        trl={"loss_type": "grpo", **HIGHER, **K3, **vllm("token_truncate", high=1.3)},
        ours=GRPO | {"clip_high": 0.28, "beta": BETA, "correction": {"kind": "truncate", "cap": 1.3}},
    ),
    Case(
        name="truncated, with CISPO",
        trl={"loss_type": "cispo", "epsilon_high": 1.2, **vllm("token_truncate", high=1.3)},
        ours=loss("cispo", clip_high=0.2, correction={"kind": "truncate", "cap": 1.3}),
    ),
]

ADVANTAGES = [
    Case(
        name="advantages: group mean",
        trl={"scale_rewards": "none"},
        compute=lambda batch: advantages(batch, normalize="none"),
        compare=("advantages",),
    ),
    Case(
        name="advantages: group mean and std",
        trl={"scale_rewards": "group"},
        compute=advantages,
        compare=("advantages",),
        note="TRL divides by the std of a sample (n - 1), ours by that of the group itself (n); arXiv "
        "2402.03300 does not tell which",
        undo=by_sample_std,
    ),
    Case(
        name="advantages: group mean, std of the batch",
        trl={"scale_rewards": "batch"},
        compute=lambda batch: whitened(batch, normalize="batch_std"),
        compare=("advantages",),
        note="TRL divides by the (sample) std of the rewards, ours by that of the advantages, as REINFORCE++ "
        "with a baseline has it (arXiv 2501.03262)",
        undo=by_std_of_rewards,
    ),
    Case(
        name="advantages: leave one out",
        side="rloo",
        trl={"beta": 0.0},
        compute=lambda batch: advantages(batch, baseline="leave_one_out", normalize="none"),
        batch="whole",
        compare=("advantages",),
    ),
    Case(
        name="advantages: leave one out, whitened",
        side="rloo",
        trl={"beta": 0.0, "normalize_advantages": True},
        compute=lambda batch: whitened(batch, baseline="leave_one_out", normalize="none"),
        batch="whole",
        compare=("advantages",),
        note="TRL divides by the std of a sample (n - 1), ours by that of the batch itself (n)",
        undo=by_sample_std_of_batch,
    ),
    Case(
        name="KL in the reward",
        side="rloo",
        trl={"beta": 0.05},
        compute=lambda batch: penalised(batch, 0.05),
        batch="whole",
        compare=("advantages",),
    ),
]

CASES = [*OPS, *LOSSES, *CORRECTIONS, *ADVANTAGES]
