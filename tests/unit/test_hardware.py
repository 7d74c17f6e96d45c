"""What the CPU can do decides what "auto" computes in."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from apps.grpo.config import GRPOConfig, load_config
from forge import hardware
from forge.actors._vllm.arguments import engine_args
from forge.config import describe
from tests.integration.trainer_cases import completion_groups, start_reference

INTEL = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\nbugs\t\t: none\n"
AMD = "processor\t: 0\nflags\t\t: fpu avx2 fma\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which a CPU says what it has."""
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    hardware.cpu_flags.cache_clear()
    yield hardware.CPU_INFO
    hardware.cpu_flags.cache_clear()


def config_of(*argv: str) -> GRPOConfig:
    return load_config(argv).config


@pytest.mark.parametrize(
    ("cpu", "dtype"), [(INTEL, "bfloat16"), (ARM, "bfloat16"), (AMD, "float32"), (None, "float32")]
)
def test_a_cpu_computes_in_what_it_is_fast_at_and_a_gpu_in_bfloat16(
    machine: Path, tmp_path: Path, cpu: str | None, dtype: str
) -> None:
    if cpu is not None:
        machine.write_text(cpu)
    config = config_of()
    assert config.training.dtype == dtype
    assert config_of("--services.trainer.with_gpus", "true").training.dtype == "bfloat16"
    (tmp_path / "resolved.yaml").write_text(describe(config))
    hardware.cpu_flags.cache_clear()
    machine.write_text(AMD if dtype == "bfloat16" else INTEL)  # the run goes on elsewhere
    assert config_of("--config", str(tmp_path / "resolved.yaml")) == config


@pytest.mark.parametrize(("cpu", "same_as"), [(INTEL, "bfloat16"), (AMD, "float32")])
def test_actors_choose_by_the_cpu_that_they_run_on(
    machine: Path, tiny_llama: Path, cpu: str, same_as: str
) -> None:
    machine.write_text(cpu)
    groups = completion_groups(lengths=((3, 7, 2), (5, 9, 4)))

    async def logprobs(dtype: str) -> list[Tensor]:
        return await (await start_reference(tiny_llama, dtype)).logprobs(groups[0])

    chosen, same = asyncio.run(logprobs("auto")), asyncio.run(logprobs(same_as))
    assert all(torch.equal(*pair) for pair in zip(chosen, same, strict=True))
    other = asyncio.run(logprobs("float32" if same_as == "bfloat16" else "bfloat16"))
    assert not all(torch.equal(*pair) for pair in zip(chosen, other, strict=True))
    args = engine_args({}, model=str(tiny_llama), seed=0, num_procs=1, executor=None)
    assert args.dtype == ("auto" if same_as == "bfloat16" else "float32")  # auto is vLLM's: the model's own


def test_who_asks_for_what_the_cpu_is_slow_at_is_told(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.write_text(AMD)
    assert config_of("--training.dtype", "bfloat16").training.dtype == "bfloat16"
    hardware.warn_of_slow_bfloat16("the trainer")
    assert "the trainer computes in bfloat16" in caplog.text
    caplog.clear()
    hardware.cpu_flags.cache_clear()
    machine.write_text(INTEL)
    with caplog.at_level(logging.WARNING):
        hardware.warn_of_slow_bfloat16("the trainer")
    assert not caplog.text
