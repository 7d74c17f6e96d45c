"""DatasetActor, killed: it reads on where it was, and a call that is repeated gets the row it had."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.controller import journal
from forge.controller.call import serving
from forge.data import dataset
from forge.data.dataset import DatasetActor
from forge.data_models import Sample
from forge.errors import DatasetError

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 23}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


def write(folder: Path, answers: list[Any]) -> str:
    file = folder / "data.jsonl"
    rows = [{"question": f"number {n}", "answer": answer} for n, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def arguments(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "task":
        return {"path": "reasoning_gym/chain_sum", "options": CHAIN_SUM}
    return {"path": write(folder, [str(n) for n in range(23)]), "streaming": kind == "stream"}


async def started(state_dir: Path | None, tokenizer: Path, **arguments: Any) -> DatasetActor:
    """A new process in the place of the one before."""
    actor = DatasetActor(tokenizer=str(tokenizer), **arguments)
    actor.state_dir = state_dir
    await actor.setup()
    return actor


async def ask(actor: DatasetActor, call: str) -> Sample:
    with serving(call):
        return await actor.sample()


@pytest.mark.parametrize("kind", ["table", "stream", "task"])
def test_kills_at_any_time_neither_skip_nor_repeat_a_row(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Against an actor that lives on: over three epochs, with lost answers asked for again in any order."""
    settings = arguments(kind, tmp_path)
    file = tmp_path / "state/dataset.journal"

    async def scenario(rng: random.Random) -> None:
        undisturbed = await started(None, tiny_llama, **settings)
        wanted = [await undisturbed.sample() for _ in range(70)]
        actor = await started(file.parent, tiny_llama, **settings)
        got: list[Sample] = []
        while len(got) < len(wanted):
            size, inode = file.stat().st_size, file.stat().st_ino
            got.append(await ask(actor, f"call {len(got)}"))
            if rng.random() < 0.2:
                n = rng.randrange(max(0, len(got) - 10), len(got))
                assert await ask(actor, f"call {n}") == got[n]
            if rng.random() < 0.15:
                if rng.random() < 0.5 and file.stat().st_ino == inode:  # while the row was written down
                    with open(file, "ab") as written:
                        written.truncate(rng.randrange(size, file.stat().st_size))
                    got.pop()
                actor = await started(file.parent, tiny_llama, **settings)
                assert (await actor.info()).next_number == len(got)
                for n in rng.sample(range(max(0, len(got) - 8), len(got)), k=min(len(got), 4)):
                    assert await ask(actor, f"call {n}") == got[n]
        assert got == wanted

    for seed, small_bytes in enumerate((4 * 2**20, 2000, 2000)):  # a journal that is seldom cut, and often
        monkeypatch.setattr(journal, "SMALL_BYTES", small_bytes)
        file.unlink(missing_ok=True)
        asyncio.run(scenario(random.Random(seed)))


def test_another_process_has_the_same_rows_at_the_same_positions(tmp_path: Path, tiny_llama: Path) -> None:
    settings = [
        {**arguments(kind, tmp_path), "tokenizer": str(tiny_llama)} for kind in ("table", "stream", "task")
    ]
    script = f"""
import asyncio, json
from forge.data.dataset import DatasetActor
async def main():
    for settings in {settings!r}:
        actor = DatasetActor(**settings)
        await actor.setup()
        print(json.dumps([await actor.sample() for _ in range(30)]))
asyncio.run(main())
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    async def here() -> list[list[Sample]]:
        actors = [await started(None, **{**one, "tokenizer": tiny_llama}) for one in settings]
        return [[await actor.sample() for _ in range(30)] for actor in actors]

    assert [json.loads(line) for line in process.stdout.splitlines()[-3:]] == asyncio.run(here())


def test_a_row_that_can_not_be_asked_is_refused_again_and_not_skipped(
    tmp_path: Path, tiny_llama: Path
) -> None:
    path = write(tmp_path, [*(str(n) for n in range(10)), None])

    async def scenario() -> None:
        actor = await started(tmp_path / "state", tiny_llama, path=path, seed=1)
        calls: dict[str, Sample | str] = {}
        for n in range(11):
            try:
                calls[str(n)] = await ask(actor, str(n))
            except DatasetError as error:
                calls[str(n)] = str(error)
        assert [type(answer) for answer in calls.values()].count(str) == 1
        again = await started(tmp_path / "state", tiny_llama, path=path, seed=1)
        for one in (actor, again):
            for call, answer in calls.items():
                if isinstance(answer, str):
                    with pytest.raises(DatasetError) as caught:
                        await ask(one, call)
                    assert str(caught.value) == answer
                else:
                    assert await ask(one, call) == answer

    asyncio.run(scenario())


def test_a_long_run_leaves_a_short_journal(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SMALL_BYTES", 20_000)
    monkeypatch.setattr(dataset, "REMEMBERED_ANSWERS", 10)
    settings = arguments("table", tmp_path)

    async def scenario() -> None:
        actor = await started(tmp_path / "state", tiny_llama, **settings)
        for n in range(500):
            last = await ask(actor, f"call {n}")
            assert (tmp_path / "state/dataset.journal").stat().st_size < 22_000
        actor = await started(tmp_path / "state", tiny_llama, **settings)
        assert await ask(actor, "call 499") == last
        assert (await actor.info()).next_number == 500

    asyncio.run(scenario())
