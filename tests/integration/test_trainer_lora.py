"""Low-rank adapters on one process, against transformers and torch's parametrizations."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from forge.actors.trainer import TitanTrainer
from forge.actors.trainer.checkpoint_folder import CheckpointFolder
from forge.actors.trainer.lora_options import LORA_LAYERS
from forge.errors import ConfigError
from forge.weights.box import Box
from forge.weights.part import Change
from tests.integration.plain_training import add_low_rank, plain_logprobs
from tests.integration.trainer_cases import WeightedLogprobs, batch_of, completion_groups, start_trainer

RANK, ALPHA = 4, 6.0
LORA = {"rank": RANK, "alpha": ALPHA}
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}  # eps: no rounding error is made a step
PREFIX = "base_model.model."


class Published(dict[str, Tensor]):
    """What the trainer gives to a push, as it is stored."""

    def pack(self, tensors: dict[str, Tensor], dtype: torch.dtype, change: Change) -> None:
        for name, tensor in tensors.items():
            top, rest = tensor[:10], tensor[10:]  # as if two ranks had a part each
            boxes = (
                Box((0,) * tensor.dim(), tuple(top.shape)),
                Box((10, 0)[: tensor.dim()], tuple(rest.shape)),
            )
            parts = [change(name, part, box) for part, box in zip((top, rest), boxes, strict=True)]
            self[name] = torch.cat(parts).to(dtype)


async def _train(trainer: TitanTrainer, num_steps: int) -> list[tuple[float, float]]:
    inputs, targets = batch_of(completion_groups())
    results = [await trainer.train_step([inputs], [targets]) for _ in range(num_steps)]
    return [(r.loss, r.metrics["grad_norm"]) for r in results]


def _adapters(trainer: TitanTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.learner.model.whole_adapters()}


@pytest.mark.parametrize("targets", [None, ["v_proj", "q_proj", "down_proj"]], ids=["all", "some"])
def test_steps_exports_and_adapters_are_those_of_a_parametrized_model(
    tiny_qwen3: Path, tmp_path: Path, targets: list[str] | None
) -> None:
    tokens = [7, 300, 41, 9, 128, 77, 5]
    published = Published()

    async def main() -> tuple[dict[str, Tensor], list[tuple[float, float]], Tensor]:
        trainer = await start_trainer(
            tiny_qwen3,
            WeightedLogprobs(),
            optimizer=OPTIMIZER,
            training={"lora": {**LORA, "target_modules": targets}},
        )
        first = _adapters(trainer)
        seen = await _train(trainer, 4)
        await trainer.export(str(tmp_path / "model"))
        trainer.learner.pack(published, trainer.learner.model.merge())  # type: ignore[arg-type]
        return first, seen, await trainer.score(tokens)

    first, seen, scores = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    factors = add_low_rank(model, first, ALPHA / RANK)
    wanted = {f"{PREFIX}{name}.lora_{letter}.weight" for name in _layers(model, targets) for letter in "AB"}
    assert set(first) == wanted
    for got, want in zip(seen, _train_plainly(model, factors), strict=True):
        assert got == pytest.approx(want, rel=1e-5)

    # the adapter, in the format that PEFT publishes
    adapter = load_file(tmp_path / "model/adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "model/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"]) == ("LORA", "CAUSAL_LM", RANK)
    assert config["lora_alpha"] == ALPHA
    assert config["base_model_name_or_path"] == str(tiny_qwen3)
    assert set(config["target_modules"]) == {name.rpartition(".")[2] for name in _layers(model, targets)}
    assert set(adapter) == set(factors)
    for name, factor in factors.items():
        assert (adapter[name] - factor).abs().max() < 1e-5, name

    # the weights: those of the base, with s B A where there is an adapter
    base, exported = (
        load_file(tiny_qwen3 / "model.safetensors"),
        load_file(tmp_path / "model/model.safetensors"),
    )
    assert set(exported) == set(published) == set(base)
    for name, weight in base.items():
        stem = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            a, b = (adapter[f"{stem}.lora_{letter}.weight"].double() for letter in "AB")
            want = weight.double() + ALPHA / RANK * b @ a
            assert not torch.equal(weight, exported[name])
            assert (exported[name] - want).abs().max() < 2e-7
            assert (published[name] - want).abs().max() < 2e-7
        else:
            assert torch.equal(weight, exported[name]) and torch.equal(weight, published[name])

    # transformers computes by the merged weights what the trainer computes by adapters
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        log_p = torch.log_softmax(merged(torch.tensor([tokens])).logits[0, :-1], -1)
    assert (log_p.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0] - scores).abs().max() < 2e-5


def _layers(model: nn.Module, targets: list[str] | None) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [n for n in names if n != "lm_head" and (targets is None or n.rpartition(".")[2] in targets)]


def _train_plainly(model: Any, factors: dict[str, nn.Parameter]) -> list[tuple[float, float]]:
    """Four steps of batch_of(completion_groups()), each sequence by itself."""
    optimizer = torch.optim.AdamW(factors.values(), **OPTIMIZER)
    completions = [c for group in completion_groups() for c in group]
    seen = []
    for _ in range(4):
        weights = torch.cos(2.0 * torch.arange(len(completions)))
        with parametrize.cached():
            terms = [w * plain_logprobs(model, c).sum() for w, c in zip(weights, completions, strict=True)]
            loss = -torch.stack(terms).sum() / len(completions)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss.detach()), float(norm)))
    return seen


def test_first_values_follow_the_seed_and_change_nothing(tiny_qwen3: Path) -> None:
    async def main(seed: int, **training: Any) -> tuple[dict[str, Tensor], Tensor]:
        trainer = await start_trainer(tiny_qwen3, WeightedLogprobs(), training=training, seed=seed)
        return _adapters(trainer), await trainer.score([7, 300, 41])

    (one, scores), (again, _), (other, _) = (asyncio.run(main(seed, lora=LORA)) for seed in (0, 0, 1))
    (none, untouched) = asyncio.run(main(0))
    assert not none and torch.equal(scores, untouched)
    firsts = {}
    for name, value in one.items():
        assert torch.equal(value, again[name])
        if "lora_B" in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            assert 0.9 < value.abs().max() * value.shape[1] ** 0.5 <= 1  # kaiming uniform, a = sqrt(5)
            firsts[float(value[0, 0])] = name
    assert len(firsts) == len(one) / 2  # no two alike


def test_checkpoints_and_snapshots_hold_adapters_and_go_on_to_the_bit(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    async def start(
        checkpoint: str | None,
        state_dir: Path | None = None,
        lora: dict[str, Any] | None = LORA,
        model: Path = tiny_qwen3,
    ) -> TitanTrainer:
        trainer = TitanTrainer.__new__(TitanTrainer)
        trainer.rank, trainer.world_size, trainer.state_dir = 0, 1, state_dir
        trainer.__init__(
            model,
            WeightedLogprobs(),
            optimizer=OPTIMIZER,
            training={"seq_len": 64, "dtype": "float32", "snapshot_every": 2, "lora": lora},
            checkpoint={"folder": checkpoint and str(tmp_path / checkpoint)},
        )
        await trainer.setup()
        await trainer.catch_up()
        return trainer

    async def main() -> None:
        undisturbed = await start(None)
        curve = await _train(undisturbed, 5)
        final = undisturbed.learner.tensors()
        num_trained = sum(a.numel() for a in _adapters(undisturbed).values())
        # each with two moments and a step count: nothing else is trained, or saved
        assert sum(tensor.numel() for tensor in final) == 3 * num_trained + len(final) // 4

        begun = await start("run")
        assert await _train(begun, 2) == curve[:2]
        await begun.save_checkpoint()
        await begun.teardown()
        stored = CheckpointFolder(tmp_path / "run").metadata(2).state_dict_metadata
        sizes = [
            info.size.numel() for name, info in stored.items() if isinstance(info, TensorStorageMetadata)
        ]
        assert sum(sizes) == sum(tensor.numel() for tensor in final)
        resumed = await start("run")
        assert await _train(resumed, 3) == curve[2:]
        assert all(map(torch.equal, resumed.learner.tensors(), final))
        with pytest.raises(
            ConfigError, match=r"step-2 was written with training.lora \{'rank': 4, .* null: "
        ):
            await start("run", lora=None)
        with pytest.raises(
            ConfigError, match=r"'alpha': 6.0, .* but it is .*'alpha': 5.0, .*: set it as it "
        ):
            await start("run", lora={**LORA, "alpha": 5.0})
        other = tmp_path / "other"
        shutil.copytree(tiny_qwen3, other)
        weights = load_file(other / "model.safetensors")
        save_file({name: 1.001 * weight for name, weight in weights.items()}, other / "model.safetensors")
        with pytest.raises(ConfigError, match="step-2 holds adapters of another model than .*other: name"):
            await start("run", model=other)
        await (await start("run", lora={**LORA, "target_modules": list(LORA_LAYERS)[::-1]})).teardown()

        (tmp_path / "state").mkdir()
        killed = await start(None, tmp_path / "state")
        await _train(killed, 3)
        killed.recovery.close()
        replaced = await start(None, tmp_path / "state")
        assert (await replaced.progress()).num_steps == 3
        assert await _train(replaced, 2) == curve[3:]
        assert all(map(torch.equal, replaced.learner.tensors(), final))

    asyncio.run(main())
