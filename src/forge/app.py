"""run_app: from a command line to a finished run, with its folder, its metrics and its exit code."""

import asyncio
import dataclasses
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from forge.config import Loaded, describe
from forge.controller import Runtime
from forge.controller.chaos import Chaos
from forge.controller.launcher import make_launcher
from forge.errors import ForgeError
from forge.grace import save_in_time
from forge.observability.console import console_sink
from forge.observability.jsonl import JSONLSink
from forge.observability.logs import configure_logging
from forge.observability.report import draw_report, read_metrics, summarize
from forge.observability.tracker import Sink, Tracker
from forge.observability.wandb import WandbSink


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
    def steps(self) -> int: ...
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


C = TypeVar("C", bound=AppConfig)


class Run:
    """One run of an app: its folder, and a line of metrics for each step."""

    def __init__(self, config: AppConfig) -> None:
        self.folder = Path(config.output_dir) / time.strftime("%Y%m%d-%H%M%S")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(describe(config))
        sinks: list[Sink] = [JSONLSink(self.folder / "metrics.jsonl")]
        if config.logging.wandb:
            values = dataclasses.asdict(config)  # pyright: ignore[reportArgumentType]
            sinks.append(WandbSink(config.logging.project, config.logging.run_name, values, self.folder))
        sinks.append(console_sink(config.steps, str(self.folder)))  # last: it takes over the terminal
        self._tracker = Tracker(sinks)
        self._config = config
        self._save: Callable[[], Awaitable[object]] | None = None
        self._chaos: Chaos | None = None
        self._killing: asyncio.Task[None] | None = None
        self._last = time.perf_counter()

    async def report(self, step: int) -> None:
        """Collects what all processes recorded since the last step and hands it to every sink."""
        values = await Runtime.current().drain_metrics()
        now = time.perf_counter()
        values["time/step_s"] = now - self._last
        self._last = now
        if self._killing is not None and self._killing.done():
            self._killing.result()
        if "generator/num_tokens" in values:
            values["throughput/tokens_per_s"] = values["generator/num_tokens"] / values["time/step_s"]
        self._tracker.log(step, values)

    def started(self) -> None:
        """Steps are timed from here on: what came before was the start of the machines."""
        self._last = time.perf_counter()
        chaos = self._config.chaos
        if chaos.targets:
            services = Runtime.current().services
            self._chaos = Chaos(services, chaos.targets, every_s=chaos.every_s, seed=chaos.seed)
            self._killing = asyncio.create_task(self._chaos.run(), name="chaos")

    def save_when_interrupted(self, save: Callable[[], Awaitable[object]]) -> None:
        """Has `save` awaited when Ctrl-C or SIGTERM has cancelled `main`, before the machines are stopped.

        A trainer's `save_checkpoint` waits for the step under way. After SAVE_GRACE_S it is given up; a
        second signal ends it at once.
        """
        self._save = save

    async def interrupted(self) -> None:
        """`main` has been cancelled."""
        if self._save is not None:
            await save_in_time(self._save)

    def close(self) -> None:
        """Ends the output; draws the report when there was a step."""
        if self._killing is not None:
            self._killing.cancel()
        self._tracker.close()
        if self._chaos is not None:
            print(self._chaos.summary(), flush=True)
        rows = read_metrics(self.folder / "metrics.jsonl")
        if rows:
            draw_report(rows, self.folder / "report.png")
            print(f"{summarize(rows)}; files: {self.folder}/", flush=True)


def run_app(
    main: Callable[[C, Run], Awaitable[None]],
    load: Callable[[Sequence[str]], Loaded[C]],
    placement: Callable[[C], str],
    argv: Sequence[str] | None = None,
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
            asyncio.run(_run(main, loaded.config))
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


async def _run(main: Callable[[C, Run], Awaitable[None]], config: C) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    hosts = config.launcher
    launcher = make_launcher(hosts.name, hosts.num_hosts, hosts.gpus_per_host)
    async with Runtime(launcher=launcher, stall_timeout_s=config.stall_timeout_s):
        run = Run(config)
        try:
            await main(config, run)
        except asyncio.CancelledError:
            await run.interrupted()
            raise
        finally:
            run.close()
