"""Parcel: arguments, results and exceptions as bytes on their way between processes."""

import os
import pickle
import traceback
from typing import Any

import cloudpickle

from forge.errors import ActorFailure

FRAME_BYTES = 256 << 10  # calls share messages up to this size; what is larger gains nothing by it


def pack(value: Any) -> bytes:
    """Pickles anything that cloudpickle can; raises TypeError, naming the value's type, for what it can't."""
    try:
        packed = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        if b"__main__" not in packed:  # the other process has another __main__: that goes by value
            return packed
    except Exception:  # lambdas and local classes are beyond pickle, not beyond cloudpickle
        pass
    try:
        return cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise TypeError(f"it can't be sent to another process: {error}") from error


def is_large(value: Any) -> bool:
    """Whether bytes, text, a tensor or an array is larger than a frame, told without pickling it."""
    size = len(value) if isinstance(value, bytes | bytearray | str) else getattr(value, "nbytes", 0)
    return isinstance(size, int) and size > FRAME_BYTES


def unpack(packed: bytes) -> Any:
    """What `pack` was given."""
    return pickle.loads(packed)


def travelling(error: BaseException, place: str) -> Exception:
    """The exception as it should arrive at the caller, with the traceback of this process as a note.

    Its own type where that can be unpickled, else an ActorFailure with the same words: Monarch loses the
    reply of an endpoint whose exception can't be pickled, and its caller would wait for ever. An exception
    that ends processes (SystemExit) is the endpoint's error too, not this process's end.
    """
    where = f"raised in {place} (pid {os.getpid()}):\n{''.join(traceback.format_exception(error))}"
    if isinstance(error, Exception):
        try:
            unpack(pack(error))
            arriving = error
        except Exception:  # whatever its pickling does, the words must arrive
            arriving = ActorFailure(f"{type(error).__name__}: {error}")
    else:
        arriving = ActorFailure(f"the endpoint raised {error!r}, which would end the process")
    arriving.add_note(where)
    return arriving
