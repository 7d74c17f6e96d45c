"""The doctor: what it prints on this machine, and what it finds wrong on a broken one."""

import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from forge import doctor
from forge.doctor import Checkup, check_transports, check_versions, import_error, version_problems

SOURCE = Path(__file__).parents[2] / "src"


def test_a_healthy_machine_has_no_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(find_spec(module) for module in doctor.MODULES)
    monkeypatch.setattr(doctor, "MODULES", ("monarch",))  # the others take seconds each
    assert doctor.main() == 0
    told = capsys.readouterr().out
    assert f"torchmonarch  {metadata.version('torchmonarch')}" in told and "monarch       ok" in told
    for word in ("versions:", "imports:", "CPU cores", "shared memory", "RDMA", "no problems found"):
        assert word in told


def test_a_problem_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "MODULES", ("json", "no_such_module"))
    monkeypatch.setattr(doctor, "GPU_PROBE", "")
    assert doctor.main() == 1
    assert "- `import no_such_module` fails (ModuleNotFoundError: " in capsys.readouterr().out


def test_a_bare_python_gets_a_list_of_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import sys\n"
        f"sys.path = [p for p in sys.path if 'site-packages' not in p] + [{str(SOURCE)!r}]\n"
        "from forge import doctor\n"
        "checkup = doctor.Checkup()\n"
        "doctor.check_versions(checkup)\n"
        "print(*checkup.problems, sep='\\n')\n"
    )
    command = [sys.executable, "-S", str(tmp_path / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "vLLM is missing" in done.stdout and "./scripts/install.sh" in done.stdout


def test_every_pin_that_is_not_met_is_named_with_both_versions() -> None:
    installed = metadata.version("omegaconf")
    assert version_problems(
        [
            f"omegaconf=={installed}",
            "omegaconf==0.0.1",
            "no-such-package>=2",
            "no-such-package>=2; python_version < '3.0'",
            "no-such-package>=2; extra == 'gpu'",
            "omegaconf==0.0.2; extra == 'gpu'",
            "torch==2.13.0",  # a build such as 2.13.0+cpu counts
        ]
    ) == [
        f"omegaconf is {installed}, forge needs ==0.0.1: run ./scripts/install.sh",
        "no-such-package>=2 is missing: run ./scripts/install.sh",
        f"omegaconf is {installed}, forge needs ==0.0.2: run ./scripts/install.sh",
    ]


def test_an_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0, "final", 0))
    checkup = Checkup()
    check_versions(checkup)
    assert any("forge needs >= 3.11, < 3.14" in problem for problem in checkup.problems)


def test_a_module_that_fails_to_import_tells_its_last_words() -> None:
    assert import_error("json") is None
    assert import_error("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
    assert import_error("os; os._exit(3)") == "exit code 3"


def test_rdma_that_is_asked_for_but_absent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTORE_USE_RDMA", "1")
    monkeypatch.setattr("forge.doctor.rdma_adapters", list)
    checkup = Checkup()
    check_transports(checkup)
    assert any("falls back to TCP" in fact for fact in checkup.facts)
    assert checkup.problems == []
