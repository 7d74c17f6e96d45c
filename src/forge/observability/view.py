"""What an app shows of its metrics: on the console, in the picture and in the sentence about a run."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """Metrics by name ("group/name")."""

    shown: Mapping[str, tuple[str, str]]  # on the console: label -> metric and format
    goal: tuple[str, str]  # what the run is about: its name and metric
    ends: tuple[int, int]  # values of the goal that its first and its last mean are made of
    panels: tuple[tuple[str, str, str], ...]  # four in the picture: title, metric, color
    throughput: tuple[str, str]  # tokens and the seconds they took
    # metrics of an evaluation, without the number they end with; the first is drawn with the goal
    evaluation: tuple[str, ...] = ()

    def evaluated(self, values: Mapping[str, float]) -> dict[str, float]:
        """What an evaluation in this step came to, by names like avg@4, in order; nothing without one."""
        found = []
        for prefix in self.evaluation:
            numbers = [name.removeprefix(prefix) for name in values if name.startswith(prefix)]
            found += [f"{prefix}{number}" for number in sorted(numbers, key=int)]
        return {name.rpartition("/")[2]: values[name] for name in found}

    def tokens_per_s(self, values: Mapping[str, float]) -> float | None:
        """None where a step has no such metrics."""
        tokens, seconds = (values.get(name) for name in self.throughput)
        return tokens / seconds if tokens is not None and seconds else None


RL_VIEW = View(
    shown={
        "reward": ("reward/mean", "{:.3f}"),
        "loss": ("loss/total", "{:+.4f}"),
        "kl": ("loss/kl", "{:.4f}"),
        "entropy": ("loss/entropy", "{:.3f}"),
        "logprob gap": ("logprob_gap/mean", "{:.4f}"),
        "staleness": ("staleness/mean", "{:.1f}"),
        "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
    },
    goal=("reward", "reward/mean"),
    ends=(3, 10),
    panels=(
        ("Mean reward", "reward/mean", "#2a7f62"),
        ("KL to the reference (nats per token)", "loss/kl", "#b5482a"),
        ("Entropy (nats per token)", "loss/entropy", "#7b5ea7"),
        ("Step time (s)", "time/step_s", "#35618f"),
    ),
    throughput=("generator/num_tokens", "time/step_s"),
    evaluation=("evaluation/avg@", "evaluation/pass@"),
)

SFT_VIEW = View(
    shown={
        "loss": ("loss/total", "{:.4f}"),
        "validation": ("validation/loss", "{:.4f}"),
        "grad norm": ("trainer/grad_norm", "{:.2f}"),
        "lr": ("trainer/lr", "{:.2e}"),
        "epoch": ("data/epoch", "{:.2f}"),
        "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
    },
    goal=("validation loss", "validation/loss"),
    ends=(1, 1),
    panels=(
        ("Training loss (nats per token)", "loss/total", "#35618f"),
        ("Validation loss (nats per token)", "validation/loss", "#2a7f62"),
        ("Entropy (nats per token)", "loss/entropy", "#7b5ea7"),
        ("Gradient norm", "trainer/grad_norm", "#b5482a"),
    ),
    throughput=("data/num_tokens", "time/train_s"),
)
