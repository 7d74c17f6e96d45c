"""Examples of the documentation run as they stand, that of the README on the real model."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The only Python of a page."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    script = folder / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_example_of_a_loop_of_ones_own_moves_its_weights(tmp_path: Path) -> None:
    run_example("docs/weights.md", tmp_path)


def test_the_library_example_trains_three_steps(tmp_path: Path) -> None:
    done = run_example("README.md", tmp_path)
    steps = [line.split() for line in done.stdout.splitlines() if re.match(r"^\d+ [\d.]+ ", line)]
    assert [step for step, *_ in steps] == ["1", "2", "3"]
    assert all(0 <= float(reward) <= 1 for _, reward, _ in steps)
