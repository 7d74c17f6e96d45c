"""The folder of a run's checkpoints on the disk: which are complete, which are intact, which may go."""

import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

logger = logging.getLogger(__name__)

_METADATA = ".metadata"  # what DCP writes last, once all ranks' files are on the disk
_NAME = re.compile(r"step-(\d+)")
_OLD = re.compile(r"(step-\d+)\.old")


class CheckpointFolder:
    """Folders step-N, N optimizer steps done; one gets that name when it is complete.

    While it is written it is called step-N.partial. A damaged one that was passed over becomes
    step-N.damaged; one that came after the step to start from, step-N.later. Only rank 0 changes anything.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The complete checkpoints, damaged ones among them, oldest first."""
        if not self.path.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return sorted(int(match[1]) for match, path in found if match and _is_checkpoint(path))

    def of(self, step: int) -> Path:
        """Where the checkpoint of this step is, or will be."""
        return self.path / f"step-{step}"

    def partial(self, step: int) -> Path:
        """Where it is written."""
        return self.path / f"step-{step}.partial"

    def tidy(self) -> None:
        """Removes what kills have left; finishes what they interrupted."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in list(self.path.iterdir()):
            if path.name.endswith(".partial"):
                logger.warning("%s is not complete: it is deleted", path)
                shutil.rmtree(path)
            elif match := _OLD.fullmatch(path.name):
                if (self.path / match[1]).exists():
                    shutil.rmtree(path)
                else:
                    os.replace(path, self.path / match[1])

    def drop_partial(self) -> None:
        """Deletes what was written of one that failed."""
        for path in self.path.glob("step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def finish(self, step: int) -> None:
        """The written one takes its place, and that of an earlier one of the same step; a kill leaves one."""
        final, old = self.of(step), self.path / f"step-{step}.old"
        if final.exists():
            os.replace(final, old)
        os.replace(self.partial(step), final)
        shutil.rmtree(old, ignore_errors=True)

    def purge(self, num_kept: int, also_kept: Collection[int]) -> None:
        """Deletes all complete ones but the newest few; one that can't be deleted is told in the log."""
        for step in self.steps()[:-num_kept]:
            if step not in also_kept:
                path, partial = self.of(step), self.partial(step)
                try:
                    os.replace(path, partial)  # half of one must not look complete
                    shutil.rmtree(partial)
                except OSError as error:
                    logger.warning("%s is no longer needed, but can't be deleted: %s", path, error)

    def set_aside(self, step: int) -> None:
        """Takes a damaged one out of the count; its files stay for whoever wants to look."""
        self._rename(step, "damaged")

    def set_later_aside(self, last: int | None) -> None:
        """Takes those out of the count that come after this step, to which a run goes back; None: none."""
        for step in self.steps():
            if last is not None and step > last:
                self._rename(step, "later")

    def _rename(self, step: int, ending: str) -> None:
        path = self.of(step)
        aside = self.path / f"{path.name}.{ending}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)

    def metadata(self, step: int) -> Metadata:
        """What DCP knows of an intact checkpoint."""
        return FileSystemReader(self.of(step)).read_metadata()

    def damage(self, step: int) -> str | None:
        """What is wrong with a complete checkpoint's files, as far as their lengths tell; None: nothing."""
        try:
            stored = self.metadata(step).storage_data.values()
        except Exception as error:  # unpickled garbage raises whatever it likes; it is the answer here
            return f"{_METADATA} can't be read ({type(error).__name__})"
        ends: dict[str, int] = {}
        for info in stored:
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.of(step) / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size < end:
                return f"{name} has {path.stat().st_size} of {end} bytes"
        return None


def _is_checkpoint(path: Path) -> bool:
    """Whether DCP wrote something there: others may have folders of such names."""
    return (path / _METADATA).is_file() or any(path.glob("*.distcp"))
