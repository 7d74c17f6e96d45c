"""What a run that is asked to stop still does, and what it says."""

import asyncio
import os
import signal

import pytest

import forge.grace
from forge.grace import StopRequest


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_a_request_ends_what_may_be_left_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> list[str]:
        done: list[str] = []
        with StopRequest() as stop:
            assert await stop.unless_asked(asyncio.sleep(0))
            asyncio.get_running_loop().call_later(0.01, send)
            assert not await stop.unless_asked(asyncio.sleep(60))
            send()  # a launcher that hands on what all have had
            await asyncio.sleep(0.01)
            assert not await stop.unless_asked(asyncio.sleep(60))
            done.append("saved")
        return done

    assert asyncio.run(asyncio.wait_for(main(), 20)) == ["saved"]
    assert capsys.readouterr().err == "stopping when this step is done and saved, or in 20 s\n"


def test_a_block_that_is_held_is_finished_before_the_work_around_it_ends() -> None:
    async def main() -> list[str]:
        done: list[str] = []

        async def step() -> None:
            with stop.held():
                done.append(f"evaluated: {await stop.unless_asked(asyncio.sleep(60))}")
                await asyncio.sleep(0.01)
                done.append("saved")
            await asyncio.sleep(60)
            done.append("next step")

        async def loop() -> None:
            await asyncio.create_task(step())

        with StopRequest() as stop:
            asyncio.get_running_loop().call_later(0.01, send)
            assert not await stop.unless_asked(loop())
        return done

    assert asyncio.run(asyncio.wait_for(main(), 20)) == ["evaluated: False", "saved"]


def test_no_block_begins_between_a_request_and_the_end_of_the_work_around_it() -> None:
    """What waits for several tasks is a turn late in cancelling them."""

    async def main() -> list[str]:
        done: list[str] = []
        free = asyncio.get_running_loop().create_future()

        async def step() -> None:
            await free
            with stop.held():
                done.append("takes a batch")

        async def loop() -> None:
            await asyncio.wait([asyncio.create_task(step())])

        with StopRequest() as stop:
            free.add_done_callback(lambda _: stop._on_signal(signal.SIGINT))
            asyncio.get_running_loop().call_later(0.01, free.set_result, None)
            assert not await stop.unless_asked(loop())
        return done

    assert asyncio.run(asyncio.wait_for(main(), 20)) == []


@pytest.mark.parametrize(
    ("number", "grace_s", "words"),
    [
        (signal.SIGTERM, 0.1, "not saved: the step and its checkpoint took more than 0.1 s"),
        (signal.SIGINT, 20.0, "not saved: asked to stop once more"),
    ],
)
def test_a_save_that_is_cut_off_says_so(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    grace_s: float,
    words: str,
) -> None:
    monkeypatch.setattr(forge.grace, "SAME_REQUEST_S", 0.05)

    async def main() -> None:
        with StopRequest(grace_s) as stop:
            send(number)
            asyncio.get_running_loop().call_later(0.2, send, number)
            await asyncio.sleep(60)
        assert stop.asked

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert words in capsys.readouterr().err
