"""Where the actors of an app run, and whether its model can be trained like that."""

from collections.abc import Mapping
from pathlib import Path

from apps.sections import LauncherConfig, ServiceConfig, where
from forge.actors.trainer.parallelism import ParallelismOptions
from forge.controller import ForgeActor, Runtime
from forge.controller.launcher import make_launcher
from forge.controller.ledger import Demand
from forge.controller.options import ActorOptions
from forge.controller.placement_table import placement_table
from forge.weights import close_store, open_store


def options_of(
    classes: Mapping[str, type[ForgeActor]], services: Mapping[str, ServiceConfig]
) -> list[ActorOptions]:
    """Where and how often each of these services is to start; classes: of each service."""
    return [classes[name].options(**where(service, name)) for name, service in services.items()]


def placement(hosts: LauncherConfig, options: list[ActorOptions], num_set_aside: int = 0) -> str:
    """A table of where every replica runs and what it takes, against what there is.

    num_set_aside: hosts that keep the weights only.
    """
    launcher = make_launcher(hosts.name, hosts.num_hosts, hosts.gpus_per_host)
    return placement_table(launcher, [Demand.of(each) for each in options], num_set_aside)


async def open_weight_store(num_hosts: int) -> None:
    """Opens the store on so many hosts of its own; to be called before any actor has a place."""
    runtime = Runtime.current()
    runtime.on_close(close_store)
    await open_store(await runtime.set_aside(num_hosts))


def check_model(folder: Path, parallelism: ParallelismOptions, seq_len: int) -> None:
    """Raises ConfigError unless the trainer computes what the model of this folder does, and its processes
    can share it: so that this is told before any starts."""
    from forge.actors.trainer.hf_config import check_hf_config, read_hf_config  # takes seconds: transformers

    config = read_hf_config(folder)
    check_hf_config(config, seq_len)
    parallelism.check_model(config)
