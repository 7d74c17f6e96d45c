"""Which names of shared memory a starting engine takes for left behind."""

import mmap
import os
import time
from pathlib import Path

from forge.actors._vllm.shared_memory import sweep_names


def test_old_names_of_memory_that_nobody_maps_are_swept(tmp_path: Path) -> None:
    def make(name: str, *, age_s: float = 3600.0) -> Path:
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    stale, mapped = make("40001-tp:0-[0-1]-cpushm_0"), make("40002-tp:0-[0-1]-cpushm_1")
    starting, foreign = make("40003-tp:0-[0-1]-cpushm_0", age_s=1.0), make("psm_1234abcd")
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        os.utime(mapped, (time.time() - 3600.0,) * 2)
        sweep_names(tmp_path)
    assert not stale.exists()
    assert mapped.exists() and starting.exists() and foreign.exists()
