"""What travels between processes arrives, or says why it can't."""

import threading

import numpy as np
import pytest
import torch

from forge.controller.parcel import FRAME_BYTES, is_large, pack, travelling, unpack
from forge.errors import ActorFailure, FanoutError


class NeedsKeyword(Exception):
    """Pickles, but does not unpickle: its constructor takes no positional argument."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def test_plain_values_tensors_and_lambdas_arrive() -> None:
    value = unpack(pack({"a": (1, torch.arange(3)), "f": lambda x: x + 1}))
    assert value["f"](2) == 3 and value["a"][1].tolist() == [0, 1, 2]


def test_what_cannot_be_sent_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="can't be sent to another process.*lock"):
        pack(threading.Lock())


@pytest.mark.parametrize("error", [NeedsKeyword(code=3), HoldsLock(), SystemExit(4)])
def test_an_exception_that_cannot_travel_arrives_with_its_words(error: BaseException) -> None:
    arriving = unpack(pack(travelling(error, "judge[0]")))
    assert isinstance(arriving, ActorFailure)
    assert str(error) in str(arriving) and type(error).__name__ in str(arriving)


def test_an_exception_that_can_travel_keeps_its_type_and_brings_its_traceback() -> None:
    try:
        raise FanoutError("two failed")
    except FanoutError as error:
        arriving = unpack(pack(travelling(error, "judge[0]")))
    assert type(arriving) is FanoutError and str(arriving) == "two failed"
    [note] = arriving.__notes__
    assert "raised in judge[0]" in note and "test_parcel.py" in note


def test_large_values_are_known_by_their_size() -> None:
    large = FRAME_BYTES + 1
    for value in (
        b"x" * large,
        "x" * large,
        torch.zeros(large, dtype=torch.uint8),
        np.zeros(large, np.uint8),
    ):
        assert is_large(value)
    for value in (b"x", "x", torch.zeros(3), 7, None, [b"x" * large]):
        assert not is_large(value)
