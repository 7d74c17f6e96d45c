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
from forge.observability.view import RL_VIEW, View

BARS = "▁▂▃▄▅▆▇█"
SILENCE_S = 30.0
"""How long a log is silent before it says what is going on."""


class Progress:
    """How far a run is, and how long it will still take."""

    def __init__(self, steps: int | None, title: str = "", view: View = RL_VIEW) -> None:
        self.steps = steps  # None: not known yet
        self.title = title
        self.view = view
        self.step = 0
        self.values: Mapping[str, float] = {}
        self.curve: deque[float] = deque(maxlen=48)  # of the view's goal
        self.evaluated: Mapping[str, float] = {}  # by the last evaluation
        self.evaluated_step = 0
        self.doing = ""  # what is going on within the step, and how far it is
        self.best: tuple[float, int] | None = None  # what an evaluation came to, and its step
        self._started = time.monotonic()
        self._finished: deque[float] = deque(maxlen=21)  # when the last steps ended

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self.step, self.values, self.doing = step, values, ""
        self._finished.append(time.monotonic())
        if self.view.goal[1] in values:
            self.curve.append(values[self.view.goal[1]])
        if evaluated := self.view.evaluated(values):
            self.evaluated, self.evaluated_step = evaluated, step
            score = next(iter(evaluated.values()))
            if self.best is None or score > self.best[0]:
                self.best = score, step

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the pace of the last steps; None before the second step."""
        if len(self._finished) < 2 or self.steps is None:
            return None
        return max(self.steps - self.step, 0) * _mean([b - a for a, b in pairwise(self._finished)])

    def shown(self, label: str) -> str:
        """A metric as text, "-" where it is missing."""
        name, style = self.view.shown[label]
        return style.format(self.values[name]) if name in self.values else "-"

    def evaluation(self) -> str:
        """The last evaluation as text."""
        return "  ".join(f"{name} {value:.3f}" for name, value in self.evaluated.items())

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

    def __init__(self, steps: int | None, stream: TextIO, view: View = RL_VIEW) -> None:
        self._progress = Progress(steps, view=view)
        self._stream = stream
        self._told = time.monotonic()

    def expect(self, steps: int) -> None:
        self._progress.steps = steps

    def doing(self, text: str) -> None:
        """What is going on within the step, where it takes so long that somebody may wonder."""
        if text and time.monotonic() - self._told > SILENCE_S:
            print(text, file=self._stream, flush=True)
            self._told = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        progress = self._progress
        progress.update(step, values)
        self._told = time.monotonic()
        steps = "-" if progress.steps is None else str(progress.steps)
        metrics = "  ".join(f"{label} {progress.shown(label)}" for label in progress.view.shown)
        evaluation = f"{progress.evaluation()}  " if progress.view.evaluated(values) else ""
        print(
            f"step {step:>{len(steps)}}/{steps}  {metrics}  {evaluation}step time {progress.step_time()}  "
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

    def __init__(self, steps: int | None, title: str = "", view: View = RL_VIEW) -> None:
        self._progress = Progress(steps, title, view)
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

    def expect(self, steps: int) -> None:
        self._progress.steps = steps

    def doing(self, text: str) -> None:
        self._progress.doing = text

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.update(step, values)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._terminal.release()
        self._live.stop()


def console_sink(steps: int | None, title: str = "", view: View = RL_VIEW) -> DisplaySink | LineSink:
    """A display where stdout is a terminal, else a line a step on stdout. Where the number of steps is only
    known later, `expect` tells it."""
    return DisplaySink(steps, title, view) if sys.stdout.isatty() else LineSink(steps, sys.stdout, view)


def render(progress: Progress) -> Group:
    """What the display shows: how far, the metrics, where the time goes, the goal so far, the evaluation."""
    head = Table.grid(padding=(0, 2))
    steps = progress.steps
    head.add_row(
        Text(progress.title, style="bold"),
        f"step {progress.step}/{'-' if steps is None else steps}",
        ProgressBar(total=steps, completed=progress.step, width=24),
        "" if steps is None else f"{progress.step / steps:.0%}",
        f"elapsed {clock(progress.elapsed_s)}",
        f"ETA {clock(progress.eta_s)}",
    )
    doing = [Text(progress.doing, style="dim", no_wrap=True, overflow="ellipsis")] if progress.doing else []
    if not progress.values:
        return Group(head, *doing or [Text("the actors start and the first step runs", style="dim")])
    metrics = Text(no_wrap=True, overflow="ellipsis")
    for label in progress.view.shown:
        metrics.append(f"{label} ", style="dim").append(f"{progress.shown(label)}   ", style="bold")
    times = Text("step time ", style="dim", no_wrap=True, overflow="ellipsis")
    times.append(progress.step_time(), style="default")
    curve = Text(f"{progress.view.goal[0]:<9} ", style="dim").append(sparkline(progress.curve), style="green")
    lines = [head, metrics, times, curve]
    if progress.best is not None:
        score, step = progress.best
        evaluation = Text("evaluation ", style="dim", no_wrap=True, overflow="ellipsis")
        evaluation.append(progress.evaluation(), style="bold")
        evaluation.append(f"   at step {progress.evaluated_step}, best {score:.3f} at {step}", style="dim")
        lines.append(evaluation)
    return Group(*lines, *doing)


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
