"""One readable format for the log records of forge and its apps, in every process."""

import logging
import sys
from typing import TextIO

OURS = ("forge", "apps")  # shown from INFO on; other libraries only from WARNING on


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: int = logging.INFO, process: str = "") -> None:
    """Sets the format `12:03:45 INFO forge.weights: text`; `process`, where given, names this process in it.

    May be called again; the last call wins.
    """
    name = f" [{process}]" if process else ""
    handler = StderrHandler()
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s{name} %(name)s: %(message)s", "%H:%M:%S")
    )
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith(OURS))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    for logger in OURS:
        logging.getLogger(logger).setLevel(level)
