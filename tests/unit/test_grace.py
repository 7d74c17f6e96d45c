"""What an interrupted run says and does about its last checkpoint."""

import asyncio
import time

import pytest

from forge.errors import ForgeError
from forge.grace import save_in_time


def test_a_save_that_is_done_in_time_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(save_in_time(lambda: asyncio.sleep(0), grace_s=5))
    assert capsys.readouterr().err == "saving a checkpoint, for 5 s at most\nsaved\n"


def test_a_save_that_takes_too_long_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert not asyncio.run(save_in_time(lambda: asyncio.sleep(60), grace_s=0.05))
    assert time.monotonic() - start < 5
    assert "those before it stay: not done within 0.05 s" in capsys.readouterr().err


def test_a_save_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    async def full_disk() -> None:
        raise ForgeError("no room on the disk")

    assert not asyncio.run(save_in_time(full_disk))
    assert "no checkpoint was saved, those before it stay: no room on the disk" in capsys.readouterr().err
