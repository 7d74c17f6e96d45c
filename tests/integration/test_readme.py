"""The library example of the README runs as it stands, on the real model."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_library_example_trains_three_steps(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [line.split() for line in done.stdout.splitlines() if re.match(r"^\d+ [\d.]+ ", line)]
    assert [step for step, *_ in steps] == ["1", "2", "3"]
    assert all(0 <= float(reward) <= 1 for _, reward, _ in steps)
