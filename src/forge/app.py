"""run_app: from a command line to a finished run, with its folder, its metrics and its exit code."""

import asyncio
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn, Protocol, TypeVar, runtime_checkable

from forge.config import Loaded, describe
from forge.controller import Runtime
from forge.controller.chaos import Chaos
from forge.controller.launcher import make_launcher
from forge.errors import ForgeError
from forge.observability.console import console_sink
from forge.observability.jsonl import JSONLSink, rewind
from forge.observability.logs import configure_logging
from forge.observability.report import draw_report, read_metrics, summarize
from forge.observability.tracker import Sink, Tracker
from forge.observability.view import RL_VIEW, View
from forge.observability.wandb import WandbSink
from forge.runs import CONFIG, earlier_folder, has_checkpoint, lock, new_folder


class LoggingConfig(Protocol):
    """Where metrics go beside the console and metrics.jsonl."""

    @property
    def wandb(self) -> bool: ...
    @property
    def project(self) -> str: ...
    @property
    def run_name(self) -> str | None: ...


class ChaosConfig(Protocol):
    """What is killed on purpose, and how often."""

    @property
    def targets(self) -> list[str]: ...
    @property
    def every_s(self) -> float: ...
    @property
    def seed(self) -> int: ...


class LauncherConfig(Protocol):
    """The hosts of the run."""

    @property
    def name(self) -> Literal["this_host", "local"]: ...
    @property
    def num_hosts(self) -> int: ...
    @property
    def gpus_per_host(self) -> int | None: ...


class AppConfig(Protocol):
    """What every app's configuration has."""

    @property
    def steps(self) -> int | None: ...
    @property
    def output_dir(self) -> str: ...
    @property
    def launcher(self) -> LauncherConfig: ...
    @property
    def logging(self) -> LoggingConfig: ...
    @property
    def chaos(self) -> ChaosConfig: ...
    @property
    def stall_timeout_s(self) -> float | None: ...


@runtime_checkable
class ResumableConfig(Protocol):
    """What the configuration of an app has that can go on with an earlier run."""

    @property
    def resume(self) -> str | None: ...


C = TypeVar("C", bound=AppConfig)
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
"""Files of a run, with a line for a step."""


class Run:
    """One run of an app: its folder, and a line of metrics for each step."""

    def __init__(self, config: AppConfig, view: View = RL_VIEW) -> None:
        resume = config.resume if isinstance(config, ResumableConfig) else None
        self.resumed = resume is not None
        output_dir = Path(config.output_dir)
        self.folder = new_folder(output_dir) if resume is None else earlier_folder(resume, output_dir)
        self._lock = lock(self.folder)
        if not self.resumed:  # else its own stays until `started`
            self._write_config(config)
        sinks: list[Sink] = [JSONLSink(self.folder / METRICS, go_on=self.resumed)]
        if config.logging.wandb:
            values = dataclasses.asdict(config)  # pyright: ignore[reportArgumentType]
            sinks.append(WandbSink(config.logging.project, config.logging.run_name, values, self.folder))
        self._console = console_sink(config.steps, str(self.folder), view)
        sinks.append(self._console)  # last: it takes over the terminal
        self._tracker = Tracker(sinks)
        self._config = config
        self._view = view
        self.step = 0  # the last one that was reported
        self._has_started = False
        self._earlier: dict[str, float] = {}  # what the next row had before the run was stopped
        self._chaos: Chaos | None = None
        self._killing: asyncio.Task[None] | None = None
        self._last = time.perf_counter()

    async def report(self, step: int) -> dict[str, float]:
        """Collects what all processes recorded since the last step, hands it to every sink and returns it."""
        values = await Runtime.current().drain_metrics()
        now = time.perf_counter()
        values["time/step_s"] = now - self._last
        self._last = now
        if self._killing is not None and self._killing.done():
            self._killing.result()
        tokens_per_s = self._view.tokens_per_s(values)
        if tokens_per_s is not None:
            values["throughput/tokens_per_s"] = tokens_per_s
        row = {**values, **self._earlier}
        if self._earlier:
            rewind(self.folder / METRICS, step - 1)
        self._tracker.log(step, row)
        self._earlier = {}
        self.step = step
        return row

    def started(self, *, steps: int | None = None, done: int = 0) -> None:
        """Steps are timed from here on: what came before was the start of the machines.

        steps: how many there will be, where the configuration does not say. done: those of a run that is
        resumed, after which its files go on.
        """
        self._last = time.perf_counter()
        self._has_started = True
        self.step = done
        if steps is not None:
            self._console.expect(steps)
        if self.resumed:
            self._write_config(self._config)
            self._rewind(done or -1)  # not even step 0 before the first checkpoint
            how = f"goes on from {self.folder} after step {done}"
            print(how if done else f"{self.folder} has no checkpoint: from the beginning", flush=True)
        chaos = self._config.chaos
        if chaos.targets:
            services = Runtime.current().services
            self._chaos = Chaos(services, chaos.targets, every_s=chaos.every_s, seed=chaos.seed)
            self._killing = asyncio.create_task(self._chaos.run(), name="chaos")

    def doing(self, what: str, done: int, total: int) -> None:
        """Shows how far something is that is part of a step and may take long."""
        self._console.doing("" if done == total else f"{what} {done}/{total}")

    def reopen(self, step: int, metric: str) -> bool:
        """Whether the last step of a run that is resumed lacks this metric, since the run was stopped before
        it was measured. The next `report` then writes its row anew, with what is there and what it lacks."""
        rows = [row for row in read_metrics(self.folder / METRICS) if row["step"] == step]
        if any(metric in row for row in rows):
            return False
        for row in rows:
            self._earlier = {name: value for name, value in row.items() if name not in ("step", "time")}
        rewind(self.folder / SAMPLES, step - 1)
        return True

    def interrupted(self) -> NoReturn:
        """The end of a run that was asked to stop, and is saved, unless nothing has been learnt."""
        saved = f"saved after step {self.step}: --resume {self.folder} goes on"
        print(saved if has_checkpoint(self.folder) else "not saved: no update was done", flush=True)
        raise asyncio.CancelledError

    def _rewind(self, step: int) -> None:
        for file in (METRICS, SAMPLES):
            rewind(self.folder / file, step)

    def _write_config(self, config: AppConfig) -> None:
        """As a new run of the same would be asked for; whole or not at all, since a resume reads it."""
        if isinstance(config, ResumableConfig):
            config = dataclasses.replace(config, resume=None)  # pyright: ignore[reportArgumentType]
        new = self.folder / f"{CONFIG}.new"
        new.write_text(describe(config))
        os.replace(new, self.folder / CONFIG)

    def close(self) -> None:
        """Ends the output; draws the report when there was a step."""
        if self._killing is not None:
            self._killing.cancel()
        self._tracker.close()
        if self._chaos is not None:
            print(self._chaos.summary(), flush=True)
        rows = read_metrics(self.folder / METRICS) if self._has_started else []
        if rows:
            draw_report(rows, self.folder / "report.png", view=self._view)
            print(f"{summarize(rows, self._view)}; files: {self.folder}/", flush=True)
        self._lock.close()


def run_app(
    main: Callable[[C, Run], Awaitable[None]],
    load: Callable[[Sequence[str]], Loaded[C]],
    placement: Callable[[C], str],
    argv: Sequence[str] | None = None,
    view: View = RL_VIEW,
) -> int:
    """Runs `main` with the configuration of the command line; returns the exit code.

    0: done. 1: failed. 2: the user asked for something that can't be. 130: Ctrl-C or SIGTERM. A ForgeError is
    told in one line; any other exception with its traceback.
    """
    configure_logging()
    try:
        loaded = load(sys.argv[1:] if argv is None else argv)
        if loaded.dry_run:
            print(f"{describe(loaded.config)}\n{placement(loaded.config)}")
            return 0
        try:
            asyncio.run(_run(main, loaded.config, view))
        finally:
            Runtime.leave()
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:  # told to the user in full, and the exit code says so
        traceback.print_exc()
        return 1
    return 0


async def _run(main: Callable[[C, Run], Awaitable[None]], config: C, view: View) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    hosts = config.launcher
    launcher = make_launcher(hosts.name, hosts.num_hosts, hosts.gpus_per_host)
    async with Runtime(launcher=launcher, stall_timeout_s=config.stall_timeout_s):
        run = Run(config, view)
        try:
            await main(config, run)
        finally:
            run.close()
