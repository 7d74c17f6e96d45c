"""The progress of a run on the console: one display on a terminal, one line a step elsewhere."""

import atexit
import sys
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge.observability.terminal import CapturedTerminal
from forge.observability.tracker import Sink

METRICS = {  # label -> metric and format
    "reward": ("reward/mean", "{:.3f}"),
    "loss": ("loss/total", "{:+.4f}"),
    "kl": ("loss/kl", "{:.4f}"),
    "entropy": ("loss/entropy", "{:.3f}"),
    "logprob gap": ("logprob_gap/mean", "{:.4f}"),
    "staleness": ("staleness/mean", "{:.1f}"),
    "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
}
BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """How far a run is, and how long it will still take."""

    def __init__(self, steps: int, title: str = "") -> None:
        self.steps = steps
        self.title = title
        self.step = 0
        self.values: Mapping[str, float] = {}
        self.rewards: deque[float] = deque(maxlen=48)
        self._started = time.monotonic()
        self._finished: deque[float] = deque(maxlen=21)  # when the last steps ended

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self.step, self.values = step, values
        self._finished.append(time.monotonic())
        if "reward/mean" in values:
            self.rewards.append(values["reward/mean"])

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the pace of the last steps; None before the second step."""
        if len(self._finished) < 2:
            return None
        return max(self.steps - self.step, 0) * _mean([b - a for a, b in pairwise(self._finished)])

    def shown(self, label: str) -> str:
        """A metric as text, "-" where it is missing."""
        name, style = METRICS[label]
        return style.format(self.values[name]) if name in self.values else "-"

    def step_time(self) -> str:
        """The step's seconds and those of its phases, the longest first."""
        total = self.values.get("time/step_s")
        phases = {
            name.removeprefix("time/").removesuffix("_s"): seconds
            for name, seconds in self.values.items()
            if name.startswith("time/") and name != "time/step_s"
        }
        parts = [f"{name} {seconds:.2f}" for name, seconds in sorted(phases.items(), key=lambda p: -p[1])]
        return ("-" if total is None else f"{total:.2f} s") + (f" ({', '.join(parts)})" if parts else "")


class LineSink:
    """One line a step, for logs and pipes."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._progress = Progress(steps)
        self._stream = stream

    def log(self, step: int, values: Mapping[str, float]) -> None:
        progress = self._progress
        progress.update(step, values)
        width = len(str(progress.steps))
        metrics = "  ".join(f"{label} {progress.shown(label)}" for label in METRICS)
        print(
            f"step {step:>{width}}/{progress.steps}  {metrics}  step time {progress.step_time()}  "
            f"ETA {clock(progress.eta_s)}",
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        pass


class DisplaySink:
    """A display at the bottom of the terminal; everything else that is written scrolls above it.

    Create it before the actors: their processes then write into the scrolling part too.
    """

    def __init__(self, steps: int, title: str = "") -> None:
        self._progress = Progress(steps, title)
        self._terminal = CapturedTerminal()
        self._console = Console(file=self._terminal.screen, force_terminal=True)
        self._live = Live(
            get_renderable=lambda: render(self._progress),
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._terminal.send_lines_to(lambda line: self._console.print(Text.from_ansi(line), soft_wrap=True))
        self._live.start()
        atexit.register(self.close)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.update(step, values)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._terminal.release()
        self._live.stop()


def console_sink(steps: int, title: str = "") -> Sink:
    """A display where stdout is a terminal, else a line a step on stdout."""
    return DisplaySink(steps, title) if sys.stdout.isatty() else LineSink(steps, sys.stdout)


def render(progress: Progress) -> Group:
    """What the display shows: how far, the metrics, where the time goes, the reward so far."""
    head = Table.grid(padding=(0, 2))
    share = progress.step / progress.steps
    head.add_row(
        Text(progress.title, style="bold"),
        f"step {progress.step}/{progress.steps}",
        ProgressBar(total=progress.steps, completed=progress.step, width=24),
        f"{share:.0%}",
        f"elapsed {clock(progress.elapsed_s)}",
        f"ETA {clock(progress.eta_s)}",
    )
    if progress.step == 0:
        return Group(head, Text("the actors start and the first step runs", style="dim"))
    metrics = Text(no_wrap=True, overflow="ellipsis")
    for label in METRICS:
        metrics.append(f"{label} ", style="dim").append(f"{progress.shown(label)}   ", style="bold")
    times = Text("step time ", style="dim", no_wrap=True, overflow="ellipsis")
    times.append(progress.step_time(), style="default")
    rewards = Text("reward    ", style="dim").append(sparkline(progress.rewards), style="green")
    return Group(head, metrics, times, rewards)


def sparkline(values: deque[float]) -> str:
    """One bar a value, scaled to the smallest and largest of them; a space for NaN."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    heights = [
        0 if span == 0 else int((v - low) / span * (len(BARS) - 1)) if v == v else None for v in values
    ]
    return "".join(" " if height is None else BARS[height] for height in heights)


def clock(seconds: float | None) -> str:
    """75.2 -> "1:15", None -> "-"."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
