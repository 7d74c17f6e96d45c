"""Which frames of a stack a user wants to see, and how."""

import re
import sysconfig

from forge.controller.process_report import Frame, Stack

_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_PLUMBING = re.compile(r"(^|/)forge/controller/|/monarch/|^<frozen ")


def useful(stack: Stack) -> Stack:
    """Without asyncio, Monarch and forge's own plumbing, but for what the last useful frame called.

    Of packages between the user's frames only the first and the last frame stay. All of the stack when
    nothing in it is the user's.
    """
    kept: list[Frame] = []
    for i, frame in enumerate(stack):
        if _is_hidden(frame):
            if kept and kept[-1] == stack[i - 1] and not any(not _is_hidden(f) for f in stack[i:]):
                kept.append(frame)  # "Lock.acquire", "Queue.get": what the user's code waits in
                break
        elif not (_is_package(frame) and 0 < i < len(stack) - 1 and _is_package_run(stack[i - 1 : i + 2])):
            kept.append(frame)
    return tuple(kept) or stack


def is_busy(stack: Stack) -> bool:
    """Whether there is more in it than a thread that waits for work."""
    return any(not _is_hidden(frame) for frame in stack)


def told(frame: Frame) -> str:
    """ "trainer/titan.py:112 TitanTrainer.train_step"."""
    path = frame.file
    if _PACKAGES.search(path):
        path = _PACKAGES.split(path)[-1]
    elif path.startswith(f"{_STDLIB}/"):
        path = path.removeprefix(f"{_STDLIB}/")
    elif "/src/" in path:
        path = path.rpartition("/src/")[2]
    else:
        path = "/".join(path.split("/")[-2:])
    return f"{path}:{frame.line} {frame.function}"


def _is_package(frame: Frame) -> bool:
    return bool(_PACKAGES.search(frame.file)) and "/forge/" not in frame.file


def _is_package_run(frames: Stack) -> bool:
    return all(_is_package(frame) and not _is_hidden(frame) for frame in frames)


def _is_hidden(frame: Frame) -> bool:
    in_stdlib = frame.file.startswith(f"{_STDLIB}/") and not _PACKAGES.search(frame.file)
    return in_stdlib or bool(_PLUMBING.search(frame.file))
