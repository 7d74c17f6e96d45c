"""Whether all models of a GRPO run share the trainer's GPUs, and what its configuration is then."""

from dataclasses import replace

from apps import machines
from apps.grpo.actors import CLASSES
from apps.grpo.config import GRPOConfig, ServicesConfig
from apps.sections import ServiceConfig
from forge.controller.launcher import make_launcher
from forge.controller.ledger import Demand, Host, Ledger
from forge.errors import NotEnoughGPUs

COLOCATED = (
    "colocated: models take turns on the same devices, generators sleep while the trainer works; on devices "
    "of their own (colocate: false) rollouts and training overlap"
)


def colocated(config: GRPOConfig, hosts: list[Host] | None = None) -> GRPOConfig:
    """The configuration with `colocate` as it turns out: as it is set, or whether there are too few GPUs.

    Where it is true, generators and reference model are laid over the GPUs of the trainer. Their numbers of
    processes and replicas stay, and where the trainer has too few GPUs for them, to place them is an error.

    hosts: of the run; None: those that the launcher has.
    """
    if config.replay is not None or config.rollout_only:  # there is nothing to take turns with
        return replace(config, colocate=False)
    shared = replace(config, colocate=True, services=_over_trainer(config.services))
    if config.colocate is None:
        hosts = _hosts(config) if hosts is None else hosts
        is_needed = not _has_room(config, hosts) and _has_room(shared, hosts, only="trainer")
        return shared if is_needed else replace(config, colocate=False)
    return shared if config.colocate else config


def in_turn(names: list[str], config: GRPOConfig) -> list[list[str]]:
    """What starts together: on shared GPUs first the generator alone, which measures how much is free."""
    if config.services.generator.shares_gpus_with is None or "policy" not in names:
        return [names]
    return [["policy"], [name for name in names if name != "policy"]]


def _over_trainer(services: ServicesConfig) -> ServicesConfig:
    trainer = services.trainer
    if not trainer.with_gpus:
        return services

    def shared(service: ServiceConfig) -> ServiceConfig:
        return (
            replace(service, shares_gpus_with=trainer.mesh_name or "trainer")
            if service.with_gpus
            else service
        )

    ref_model = services.ref_model
    return replace(
        services,
        generator=shared(services.generator),
        ref_model=None if ref_model is None else shared(ref_model),
    )


def _hosts(config: GRPOConfig) -> list[Host]:
    launcher = config.launcher
    hosts = make_launcher(launcher.name, launcher.num_hosts, launcher.gpus_per_host).plan()
    return hosts[: len(hosts) - (config.weights.hosts or 0)]


def _has_room(config: GRPOConfig, hosts: list[Host], only: str | None = None) -> bool:
    services = {n: s for n, s in config.services.present().items() if only in (None, n)}
    try:
        Ledger([Host(h.name, h.gpus, h.num_cores) for h in hosts]).plan(
            [Demand.of(options) for options in machines.options_of(CLASSES, services)]
        )
    except NotEnoughGPUs:
        return False
    return True
