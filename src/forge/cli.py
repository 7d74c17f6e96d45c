"""`forge COMMAND`: what can be asked of this machine, of a run that is under way on it, or of its record."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="forge", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    why = commands.add_parser("why", help="who waits for whom in a live run, and where their code is")
    why.add_argument(
        "pid", nargs="?", type=int, help="a process of the run; needed when there are several runs"
    )
    why.set_defaults(run=lambda options: run_why(options.pid))
    doctor = commands.add_parser("doctor", help="versions, devices and transports of this machine")
    doctor.set_defaults(run=lambda _: run_doctor())
    replay = commands.add_parser("replay", help="one recorded training step again, token by token")
    replay.add_argument("--run", type=Path, required=True, metavar="DIR", dest="folder", help="of the run")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="the step, from 1")
    replay.add_argument("--tokens", type=int, default=100, metavar="K", help="tokens to print (100)")
    replay.add_argument("--json", type=Path, metavar="FILE", help="where all tokens and metrics go")
    replay.set_defaults(run=lambda o: run_replay(o.folder, o.step, num_tokens=o.tokens, json_file=o.json))
    options = parser.parse_args(argv)
    return options.run(options)


def run_why(pid: int | None) -> int:
    """Prints the wait-for graph of the only run, or of the one that a process belongs to."""
    from forge.controller.run_folder import run_base
    from forge.controller.why import explain  # what a command needs is loaded by no other

    runs = live_runs(run_base())
    chosen = [run for run in runs if pid is None or run.name == str(pid) or (run / f"{pid}.sock").exists()]
    if len(chosen) == 1:
        print(explain(chosen[0]))
        return 0
    if not runs:
        print(f"no live run of this user on this machine ({run_base()} has none)", file=sys.stderr)
    elif not chosen:
        print(f"{pid} is no process of a live run; live runs: {_names(runs)}", file=sys.stderr)
    else:
        print(f"several runs: name one of them, `forge why PID`: {_names(runs)}", file=sys.stderr)
    return 1


def run_doctor() -> int:
    """`python -m forge.doctor`."""
    from forge import doctor

    return doctor.main()


def run_replay(folder: Path, step: int, *, num_tokens: int, json_file: Path | None) -> int:
    """Does a recorded step of a run of apps.grpo again; the folder of the run is only read."""
    from forge.controller import Runtime
    from forge.errors import ForgeError

    sys.path.insert(0, os.getcwd())  # where the apps are, as for `python -m apps.grpo.main`
    try:
        from apps.grpo.replay_step import replay_step
    except ModuleNotFoundError as error:
        if error.name not in ("apps", "apps.grpo"):
            raise
        print("error: forge replay needs the folder apps: run it where that is", file=sys.stderr)
        return 2
    try:
        replay_step(folder, step, num_tokens=num_tokens, json_file=json_file)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        Runtime.leave()
    return 0


def live_runs(base: Path) -> list[Path]:
    """The folders of all runs whose root process is there, even if it is too stuck to answer."""
    from forge.controller.why import can_be_asked

    if not base.is_dir():
        return []
    folders = sorted(
        (folder for folder in base.iterdir() if folder.name.isdecimal()), key=lambda f: int(f.name)
    )
    return [folder for folder in folders if can_be_asked(folder / f"{folder.name}.sock")]


def _names(runs: Sequence[Path]) -> str:
    return ", ".join(f"{run.name} ({command_of(int(run.name))})" for run in runs)


def command_of(pid: int) -> str:
    """The command line of a process, cut short."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended meanwhile"
    return " ".join(words).strip()[:80]


if __name__ == "__main__":
    sys.exit(main())
