"""WandbSink: a run on Weights & Biases; the only door to wandb."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.errors import ConfigError


class WandbSink:
    """Logs to a project; with WANDB_MODE=offline into `folder`, for `wandb sync` later.

    ConfigError where W&B can't start, for example because nobody is logged in.
    """

    def __init__(self, project: str, run_name: str | None, config: dict[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, name=run_name, config=config, dir=str(folder))
        except wandb.Error as error:
            raise ConfigError(
                f"logging.wandb is on, but W&B can't start ({' '.join(str(error).split())}): run "
                "`wandb login`, set WANDB_MODE=offline, or set logging.wandb to false"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
