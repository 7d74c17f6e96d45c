"""When the models of a run share GPUs, and what its engine and its places are then."""

import pytest

from apps.grpo.actors import CLASSES
from apps.grpo.colocation import colocated, in_turn
from apps.grpo.config import DEFAULT_CONFIG, GRPOConfig, load_config
from apps.machines import options_of
from apps.sections import engine_config
from forge.controller.ledger import Demand, Host, Ledger
from forge.errors import ConfigError, NotEnoughGPUs


def config_of(*argv: str) -> GRPOConfig:
    return load_config(["--config", str(DEFAULT_CONFIG.parent / "base.yaml"), "--model", "a/b", *argv]).config


def hosts(num_gpus: int) -> list[Host]:
    return [Host("host", [str(i) for i in range(num_gpus)], 8)]


def gpus_of(config: GRPOConfig, num_gpus: int) -> dict[str, list[list[str]]]:
    demands = [Demand.of(options) for options in options_of(CLASSES, config.services.present())]
    plan = Ledger(hosts(num_gpus)).plan(demands)
    return {name: [place.gpus for place in plan[name]] for name in ("trainer", "generator", "ref_model")}


def engine_of(config: GRPOConfig) -> tuple[float, bool]:
    args = engine_config("folder", config.generator, config.services.generator, config.training)
    return args["gpu_memory_utilization"], args.get("enable_sleep_mode", False)


def test_models_share_gpus_when_there_are_too_few() -> None:
    config = config_of()
    apart = colocated(config, hosts(3))
    assert apart.colocate is False and engine_of(apart) == (0.8, False)
    assert {gpus[0][0] for gpus in gpus_of(apart, 3).values()} == {"0", "1", "2"}
    shared = colocated(config, hosts(1))
    assert shared.colocate is True and engine_of(shared) == (0.4, True)
    assert gpus_of(shared, 1) == {"trainer": [["0"]], "generator": [["0"]], "ref_model": [["0"]]}


def test_the_generators_are_laid_over_the_trainers_gpus_as_they_are_wanted() -> None:
    two = [
        "--trainer.procs",
        "2",
        "--parallelism.data_parallel_shard_degree",
        "2",
        "--training.batch_size",
        "8",
    ]
    shared = colocated(config_of(*two, "--generator.procs", "2"), hosts(2))
    assert gpus_of(shared, 2)["generator"] == [["0", "1"]]
    shared = colocated(config_of(*two, "--generator.num_replicas", "2"), hosts(2))
    assert gpus_of(shared, 2)["generator"] == [["0"], ["1"]]
    with pytest.raises(
        ConfigError, match="shares the GPUs of trainer, which has 2, and wants 3 replicas x 1"
    ):
        gpus_of(colocated(config_of(*two, "--generator.num_replicas", "3"), hosts(2)), 2)


def test_the_config_may_say_so_either_way() -> None:
    assert gpus_of(colocated(config_of("--colocate", "true"), hosts(8)), 8)["generator"] == [["0"]]
    with pytest.raises(NotEnoughGPUs, match=r"generator 1 \+ trainer 1 \+ ref_model 1 = 3 GPUs are wanted"):
        gpus_of(colocated(config_of("--colocate", "false"), hosts(1)), 1)
    kept = colocated(config_of("--generator.gpu_memory_utilization", "0.3"), hosts(1))
    assert engine_of(kept) == (0.3, True)


def test_without_gpus_for_the_trainer_nothing_is_shared() -> None:
    assert colocated(config_of(), hosts(0)).colocate is False, "what is missing is told as it is wanted"
    on_a_cpu = config_of(
        *(f"services.{name}.with_gpus=false" for name in ("trainer", "generator", "ref_model"))
    )
    assert colocated(on_a_cpu, hosts(0)).colocate is False
    turns = colocated(config_of("--colocate", "true", "services.trainer.with_gpus=false"), hosts(1))
    assert turns.colocate is True and engine_of(turns) == (0.8, False)
    assert colocated(config_of("--rollout_only", "true", "--colocate", "true"), hosts(1)).colocate is False


def test_on_shared_gpus_the_generator_starts_first() -> None:
    names = ["dataset", "policy", "trainer"]
    assert in_turn(names, colocated(config_of(), hosts(1))) == [["policy"], ["dataset", "trainer"]]
    assert in_turn(names, colocated(config_of(), hosts(3))) == [names]
    assert in_turn(["trainer"], colocated(config_of(), hosts(1))) == [["trainer"]]
