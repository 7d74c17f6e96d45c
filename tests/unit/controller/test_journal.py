"""Journal: what is still there after a kill, a torn record, a full disk."""

import os
import pickle
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.controller import journal as journal_module
from forge.controller.journal import Journal


def written(path: Path, records: list[Any]) -> list[int]:
    """Appends records; returns where each of them ends."""
    journal = Journal(path)
    ends = []
    for record in records:
        journal.append(record)
        ends.append(journal.num_bytes)
    journal.close()
    return ends


def read(path: Path) -> list[Any]:
    journal = Journal(path)
    journal.close()
    return journal.records


def test_records_are_read_in_the_order_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a/b/x.journal"
    assert read(path) == []
    written(path, [1, "two", None])
    written(path, [{"three": 3}])
    assert read(path) == [1, "two", None, {"three": 3}]


def test_a_record_torn_at_any_byte_is_dropped_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    records = ["first", {"second": list(range(30))}, b"third"]
    ends = [0, *written(path, records)]
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = records[: sum(end <= size for end in ends[1:])]
        assert read(path) == kept, size
        assert path.stat().st_size == ends[len(kept)]
        written(path, ["more"])
        assert read(path) == [*kept, "more"], size


@pytest.mark.parametrize("tail", [b"\0", bytes(12), bytes(100), b"\xff" * 40, bytes(range(1, 65))])
def test_garbage_behind_the_records_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "x.journal"
    written(path, [1, 2])
    with open(path, "ab") as file:
        file.write(tail)
    assert read(path) == [1, 2]


def test_a_damaged_byte_ends_the_journal_in_front_of_its_record(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    ends = written(path, ["first", "second"])
    whole = path.read_bytes()
    for place in range(ends[0], len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert read(path) == ["first"], place


def test_a_record_may_be_big(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    big = os.urandom(50 * 2**20)
    written(path, [1, big, 2])
    assert read(path) == [1, big, 2]


def test_a_class_of_the_callers_own_script_can_be_recorded(tmp_path: Path) -> None:
    class Own:  # no module has it: plain pickle refuses
        answer = 42

    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(Own())
    written(tmp_path / "x.journal", [Own()])
    [record] = read(tmp_path / "x.journal")
    assert record.answer == 42


def test_a_rewrite_replaces_all_records_and_more_can_follow(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    journal = Journal(path)
    for n in range(100):
        journal.append(n)
    journal.rewrite([7, 8])
    assert journal.num_bytes == path.stat().st_size
    journal.append(9)
    assert read(path) == [7, 8, 9]
    assert journal.num_bytes == path.stat().st_size


def test_a_rewrite_that_breaks_off_leaves_the_old_records(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    journal = Journal(path)
    journal.append("old")

    def records() -> Any:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.rewrite(records())
    journal.append("more")
    assert read(path) == ["old", "more"]
    assert [file.name for file in tmp_path.iterdir()] == ["x.journal"]  # the half written one is swept away


def test_journals_of_one_folder_do_not_share_files(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "x.a"), Journal(tmp_path / "x.b")
    first.rewrite([1])
    second.rewrite([2])
    assert (read(tmp_path / "x.a"), read(tmp_path / "x.b")) == ([1], [2])


def test_it_has_outgrown_itself_when_most_of_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SMALL_BYTES", 1000)
    journal = Journal(tmp_path / "x.journal")
    while not journal.has_outgrown:
        journal.append(bytes(100))
    assert 1000 < journal.num_bytes < 1300
    journal.rewrite([bytes(5000)])
    assert not journal.has_outgrown
    while not journal.has_outgrown:
        journal.append(bytes(100))
    assert 20_000 < journal.num_bytes < 21_000


def test_a_failed_append_takes_nothing_with_it(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    journal = Journal(path)
    journal.append("before")
    old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, old_limit[1])
    )  # half of the record fits, as on a full disk
    try:
        with pytest.raises(OSError):
            journal.append(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    journal.append("behind")
    assert read(path) == ["before", "behind"]


# Appends numbers, with bodies of many sizes, and tells of each that it is kept; rewrites now and then.
WRITER = """
import os, random, sys
from pathlib import Path
from forge.controller.journal import Journal
journal = Journal(Path(sys.argv[1]))
live = list(journal.records)[-20:]
last = live[-1][0] if live else 0
for n in range(last + 1, 10**9):
    live = [*live, (n, bytes(random.choice([10, 1000, 100_000])))][-20:]
    journal.append(live[-1])
    if n % 50 == 0:
        journal.rewrite(live)
    os.write(1, b"%d\\n" % n)
"""


def test_what_was_reported_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    last = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(random.randrange(1, 200))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.stderr.read() == b""
        process.wait()
        reported = [int(line) for line in lines if line.endswith(b"\n")]
        assert reported == list(range(last + 1, last + 1 + len(reported)))
        found = [n for n, _ in read(path)]
        assert found == list(range(found[0], found[-1] + 1))
        assert found[0] <= max(1, found[-1] - 19)  # a rewrite kept the newest twenty
        # the kill may have come between the append and the report
        assert found[-1] in (reported[-1], reported[-1] + 1)
        last = found[-1]
