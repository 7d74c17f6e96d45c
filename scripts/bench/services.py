"""forge's `route` against a raw Monarch call and a Ray actor call: latency of one caller, rate of 64.

    .venv/bin/python scripts/bench/services.py [--quick] [--rounds N] [--seconds S]
An actor that returns what it is given, as 1 and as 4 replicas, with 8 bytes and with 1 MB. Raw Monarch and
Ray choose a replica by turns. In every round the three are measured right after each other, and a ratio is
the median of the rounds' ratios: what else the machine does hits all alike. Ray gets an environment of its
own (.bench/ray), made on first use, and runs in a process of its own that only works when asked. Prints what
it does and ends with one JSON line.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rival_env import rival_python

RAY = "2.56.0"
NUM_CALLERS = 64
REPLICAS = (1, 4)
SIZES = {"8B": 8, "1MB": 1 << 20}
GOALS = {"latency_vs_monarch/8B/1": 1.15, "rate_vs_ray/8B/1": 3.0}  # at most; at least

Call = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure."""

    size: str  # of the message, a key of SIZES
    num_replicas: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one contender in one cell."""

    latency_us: float  # median, one caller
    rate: float  # calls a second, 64 callers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 short rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.35, help="of each measurement")
    parser.add_argument("--serve-ray", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_ray:
        serve_ray()
        return
    rounds, seconds = (2, 0.3) if args.quick else (args.rounds, args.seconds)
    cells = [Cell(size, num, seconds) for num in REPLICAS for size in SIZES]
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        ray_python()  # installed before anything is measured
        asyncio.run(compare(cells, rounds, Path(folder)))
    from forge.controller import Runtime

    Runtime.leave()


async def compare(cells: list[Cell], rounds: int, folder: Path) -> None:
    from forge.controller import Runtime

    load = os.getloadavg()[0]
    async with Runtime(), ray_process(folder) as ray, monarch_calls() as monarch:
        forge = {num: await forge_call(num) for num in REPLICAS}
        ours = {"forge": forge, "monarch": monarch}
        order = ["forge", "monarch", "ray"]
        ray_cpu = await idle_cpu(ray, 0.5 if rounds <= 2 else 4.0)
        print(f"ready; Ray's processes use {ray_cpu:.1%} of a core while they wait", flush=True)
        seen: dict[Cell, list[dict[str, Figures]]] = {cell: [] for cell in cells}
        for number in range(rounds):
            order = order[1:] + order[:1]
            for cell in cells:
                figures = {}
                for name in order:
                    if name == "ray":
                        figures[name] = await ray.measure(cell)
                    else:
                        figures[name] = await measure(ours[name][cell.num_replicas], cell)
                seen[cell].append(figures)
                print(f"round {number + 1}/{rounds} {told(cell, figures)}", flush=True)
    report(seen, f"load {load:.1f} before, Ray idle at {ray_cpu:.1%} of a core")


async def forge_call(num_replicas: int) -> Call:
    from forge.controller import ForgeActor, endpoint

    class Echo(ForgeActor):
        @endpoint
        async def echo(self, message: bytes) -> bytes:
            return message

    service = await Echo.options(num_replicas=num_replicas).as_service()
    return lambda message: service.echo.route(message)


@contextlib.asynccontextmanager
async def monarch_calls() -> AsyncIterator[dict[int, Call]]:
    from forge.controller._monarch import Actor, concurrent_endpoint, this_host

    class Echo(Actor):
        @concurrent_endpoint
        async def echo(self, message: bytes) -> bytes:
            return message

    meshes: list[Any] = []

    def start(num_replicas: int) -> Call:
        procs = [this_host().spawn_procs({"procs": 1}, name=f"raw{i}") for i in range(num_replicas)]
        meshes.extend(procs)
        actors = itertools.cycle([mesh.spawn("echo", Echo) for mesh in procs])
        return lambda message: next(actors).echo.call_one(message)

    try:
        yield {num: start(num) for num in REPLICAS}
    finally:
        for mesh in meshes:
            await mesh.stop()


async def measure(call: Call, cell: Cell) -> Figures:
    """The same for every contender. Every message is an object of its own, and every answer is looked at."""
    rest = bytes(SIZES[cell.size] - 8)
    serial = itertools.count()

    async def one() -> float:
        message = next(serial).to_bytes(8, "big") + rest
        started = time.perf_counter()
        answer = await call(message)
        passed = time.perf_counter() - started
        assert len(answer) == len(message) and answer[:8] == message[:8]
        return passed

    async def until(deadline: float) -> list[float]:
        times = [await one()]
        while time.perf_counter() < deadline:
            times.append(await one())
        return times

    await asyncio.gather(*(one() for _ in range(NUM_CALLERS)))  # connects, and wakes what sleeps
    times = await until(time.perf_counter() + cell.seconds)
    started = time.perf_counter()
    all_times = await asyncio.gather(*(until(started + cell.seconds) for _ in range(NUM_CALLERS)))
    rate = sum(map(len, all_times)) / (time.perf_counter() - started)
    return Figures(statistics.median(times) * 1e6, rate)


# -- Ray, in a process of its own ----------------------------------------------------------------------------


def ray_python() -> Path:
    return rival_python("ray", [f"ray=={RAY}"])


class RayProcess:
    """Measures one cell on request; nothing is in flight between requests."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def measure(self, cell: Cell) -> Figures:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(asdict(cell))}\n".encode())
        await self.process.stdin.drain()
        return Figures(**json.loads(await self.next_line()))

    async def next_line(self) -> bytes:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the Ray process ended"
        return line


@contextlib.asynccontextmanager
async def ray_process(folder: Path) -> AsyncIterator[RayProcess]:
    log = folder / "ray.log"
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            *(str(ray_python()), __file__, "--serve-ray"),
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    ray = RayProcess(process)
    try:
        print("Ray:", (await ray.next_line()).decode().strip(), flush=True)
        yield ray
    except BaseException:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        family = list(descendants(process.pid))
        assert process.stdin is not None
        process.stdin.close()  # it shuts Ray down and ends
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def serve_ray() -> None:
    """Runs in Ray's environment: a cell a line comes in, its figures go out."""
    import ray

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    ray.init(num_cpus=sum(REPLICAS), include_dashboard=False, object_store_memory=512 << 20)

    @ray.remote(max_concurrency=NUM_CALLERS, num_cpus=1)
    class Echo:
        async def echo(self, message: bytes) -> bytes:
            return message

    actors = {num: [Echo.remote() for _ in range(num)] for num in REPLICAS}
    turns = {num: itertools.cycle(several) for num, several in actors.items()}

    def call_of(num_replicas: int) -> Call:
        async def call(message: bytes) -> bytes:
            return await next(turns[num_replicas]).echo.remote(message)

        return call

    ray.get([actor.echo.remote(b"") for several in actors.values() for actor in several])
    print(f"version {ray.__version__} is up", file=answers)
    for line in sys.stdin:
        cell = Cell(**json.loads(line))
        print(json.dumps(asdict(asyncio.run(measure(call_of(cell.num_replicas), cell)))), file=answers)
    ray.shutdown()


async def idle_cpu(ray: RayProcess, seconds: float) -> float:
    """Share of a core that Ray's processes take while nothing is asked of them."""
    await asyncio.sleep(1.0)
    before = cpu_seconds(ray.process.pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(ray.process.pid) - before) / seconds


def cpu_seconds(root: int) -> float:
    total = 0.0
    for pid in [root, *descendants(root)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def descendants(root: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


# -- what came of it -----------------------------------------------------------------------------------------


def told(cell: Cell, figures: dict[str, Figures]) -> str:
    parts = (f"{name} {f.latency_us:.0f} us {f.rate:.0f}/s" for name, f in sorted(figures.items()))
    return f"{cell.size} x{cell.num_replicas}: {', '.join(parts)}"


def report(seen: dict[Cell, list[dict[str, Figures]]], note: str) -> None:
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for cell, rounds in seen.items():
        where = f"{cell.size}/{cell.num_replicas}"
        for name in ("forge", "monarch", "ray"):
            figures[f"latency_us/{where}/{name}"] = statistics.median(r[name].latency_us for r in rounds)
            figures[f"rate/{where}/{name}"] = statistics.median(r[name].rate for r in rounds)
        for rival in ("monarch", "ray"):
            ratios[f"latency_vs_{rival}/{where}"] = statistics.median(
                r["forge"].latency_us / r[rival].latency_us for r in rounds
            )
            ratios[f"rate_vs_{rival}/{where}"] = statistics.median(
                r["forge"].rate / r[rival].rate for r in rounds
            )
    is_met = [
        ratios[key] <= goal if key.startswith("latency") else ratios[key] >= goal
        for key, goal in GOALS.items()
    ]
    result = {
        "bench": "services",
        "figures": {key: round(value, 1) for key, value in figures.items()},
        "ratios": {key: round(value, 3) for key, value in ratios.items()},
        "goals": GOALS,
        "met": all(is_met),
        "note": f"ratios are forge's figure by the other's, medians over {len(next(iter(seen.values())))} "
        f"rounds; latency: at most the goal, rate: at least; {note}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
