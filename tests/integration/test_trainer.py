"""The trainer and the reference model on one process, against transformers."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from forge.actors.trainer.bad_batches import load_bad_batch
from forge.data_models import Completion, TextTrainBatch
from forge.errors import ForgeError, NotFinite
from forge.rl.loss import GRPOLoss
from forge.weights.box import Box
from forge.weights.part import Change
from tests.integration.trainer_cases import (
    FromLogits,
    InfiniteSlope,
    MeanOverTokens,
    WeightedLogprobs,
    batch_of,
    completion_groups,
    gradients_of,
    start_reference,
    start_trainer,
)


def _one_by_one(model: PreTrainedModel, groups: list[list[Completion]], advantages: Tensor) -> Tensor:
    """WeightedLogprobs over whole sequences, each by itself, through transformers."""
    sums = []
    for c, advantage in zip((c for group in groups for c in group), advantages, strict=True):
        sums.append((_sequence_logprobs(model, c) * advantage).sum())
    return -torch.stack(sums).sum() / len(sums)


def _sequence_logprobs(model: PreTrainedModel, c: Completion) -> Tensor:
    ids = torch.cat([c.prompt_ids, c.token_ids])[None]
    log_p = torch.log_softmax(model(ids).logits[0] / c.temperature, -1)
    return log_p[len(c.prompt_ids) - 1 : -1].gather(-1, c.token_ids[:, None])[:, 0]


@pytest.mark.parametrize("loss", [FromLogits(), WeightedLogprobs()], ids=["from logits", "from logprobs"])
def test_loss_and_gradients_of_packed_rows_equal_those_of_single_sequences(
    tiny_qwen3: Path, loss: object
) -> None:
    groups = completion_groups()
    inputs, targets = batch_of(groups)

    async def main() -> tuple[float, dict[str, Tensor]]:
        trainer = await start_trainer(tiny_qwen3, loss)
        result = await trainer.forward_backward([inputs], [targets])
        return result.loss, gradients_of(trainer)

    got_loss, got = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    want_loss = _one_by_one(model, groups, targets.advantages)
    want_loss.backward()
    assert got_loss == pytest.approx(want_loss.item(), abs=1e-4)
    want = {name: p.grad for name, p in model.named_parameters()}
    assert set(got) == set(want)
    for name, gradient in want.items():
        assert gradient is not None
        assert (got[name] - gradient).abs().max() < 1e-4 * max(1.0, gradient.abs().max().item()), name


def test_three_steps_equal_those_of_plain_pytorch(tiny_llama: Path) -> None:
    groups = completion_groups()
    inputs, targets = batch_of(groups)

    async def main() -> list[tuple[float, float, float]]:
        trainer = await start_trainer(
            tiny_llama,
            WeightedLogprobs(),
            optimizer={"lr": 1e-3, "weight_decay": 0.01},
            lr_scheduler={"warmup_steps": 2},
            training={"max_grad_norm": 0.5},
        )
        results = [await trainer.train_step([inputs], [targets]) for _ in range(3)]
        return [(r.loss, r.metrics["grad_norm"], r.metrics["lr"]) for r in results]

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for got, lr in zip(asyncio.run(main()), [5e-4, 1e-3, 1e-3], strict=True):
        optimizer.param_groups[0]["lr"] = lr
        loss = _one_by_one(model, groups, targets.advantages)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert got == pytest.approx((loss.item(), norm.item(), lr), rel=1e-4)


@pytest.mark.parametrize("loss", [WeightedLogprobs(), MeanOverTokens()], ids=["sequences", "tokens"])
def test_micro_batches_change_neither_loss_nor_gradient(tiny_llama: Path, loss: object) -> None:
    inputs, targets = batch_of(completion_groups())

    async def main(steps: int) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        trainer = await start_trainer(tiny_llama, loss, training={"gradient_accumulation_steps": steps})
        result = await trainer.forward_backward([inputs], [targets])
        return result.loss, result.metrics, gradients_of(trainer)

    (loss_1, metrics_1, whole), (loss_2, metrics_2, parts) = asyncio.run(main(1)), asyncio.run(main(2))
    assert loss_1 == pytest.approx(loss_2, abs=1e-5)
    assert metrics_1["length_max"] == metrics_2["length_max"] == 9
    assert metrics_1["num_tokens"] == metrics_2["num_tokens"] == 27
    for name in whole:
        assert (whole[name] - parts[name]).abs().max() < 1e-4, name


def test_two_passes_before_an_update_add_up(tiny_llama: Path) -> None:
    batches = [batch_of(completion_groups(seed)) for seed in (0, 1)]

    async def main() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        trainer = await start_trainer(tiny_llama, WeightedLogprobs())
        alone = []
        for inputs, targets in batches:
            await trainer.forward_backward([inputs], [targets])
            alone.append({name: g.clone() for name, g in gradients_of(trainer).items()})
            trainer.learner.forget()
        for inputs, targets in batches:
            await trainer.forward_backward([inputs], [targets])
        return alone, gradients_of(trainer)

    (first, second), both = asyncio.run(main())
    for name, gradient in both.items():
        assert (first[name] + second[name] - gradient).abs().max() < 1e-4, name


def test_text_is_trained_on_by_its_weights(tiny_llama: Path) -> None:
    ids = torch.randint(5, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, 7:] = False
    batch = TextTrainBatch(ids, ids.roll(-1, 1), mask, weights)

    async def main() -> float:
        trainer = await start_trainer(tiny_llama, WeightedLogprobs())
        return (await trainer.train_step([batch])).loss

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits, -1).gather(-1, ids.roll(-1, 1)[..., None])[..., 0]
    assert asyncio.run(main()) == pytest.approx(-(log_p * weights * mask).sum().item() / 2, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_the_first_step_policy_and_reference_agree(tiny_llama: Path, dtype: str) -> None:
    groups = completion_groups()
    inputs, targets = batch_of(groups)

    async def main() -> dict[str, float]:
        reference = await start_reference(tiny_llama, dtype)
        logprobs = await reference.logprobs([c for group in groups for c in group])
        padded = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
        told = dataclasses.replace(targets, ref_logprobs=padded, generator_logprobs=padded)
        trainer = await start_trainer(tiny_llama, GRPOLoss(beta=0.1), training={"dtype": dtype})
        return (await trainer.train_step([inputs], [told])).metrics

    metrics = asyncio.run(main())
    assert abs(metrics["kl"]) < 1e-9
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [None, 19])
def test_reference_logprobs_come_back_in_order_whatever_the_groups_and_passes(
    tiny_qwen3: Path, max_tokens: int | None
) -> None:
    first, second, third = completion_groups()
    warm = [dataclasses.replace(c, temperature=1.3) for c in second]
    mixed = [first[0], third[1], *warm, first[2], third[0], first[1]]

    lengths: list[int] = []

    async def main() -> list[Tensor]:
        reference = await start_reference(tiny_qwen3, max_tokens_per_pass=max_tokens)
        reference.model.parts[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].numel()))
        return await reference.logprobs(mixed)

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    for completion, got in zip(mixed, asyncio.run(main()), strict=True):
        with torch.no_grad():
            want = _sequence_logprobs(model, completion)
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-4
    assert len(lengths) == (2 if max_tokens is None else 4)  # two temperatures
    assert max_tokens is None or max(lengths) <= max_tokens


class Packed(dict[str, Tensor]):
    """What the trainer gives to a push."""

    def pack(
        self, tensors: dict[str, Tensor], dtype: torch.dtype | None = None, change: Change | None = None
    ) -> None:
        for name, tensor in tensors.items():
            changed = tensor if change is None else change(name, tensor, Box.whole(tensor.shape))
            self[name] = changed.to(dtype, copy=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_in_transformers_and_computes_the_same(
    tiny_llama: Path, tmp_path: Path, dtype: str
) -> None:
    inputs, targets = batch_of(completion_groups())
    ids = torch.randint(5, 512, (2, 30), generator=torch.Generator().manual_seed(0))

    pushed = Packed()

    async def main() -> Tensor:
        trainer = await start_trainer(
            tiny_llama, WeightedLogprobs(), optimizer={"lr": 1e-2}, training={"dtype": dtype}
        )
        await trainer.train_step([inputs], [targets])
        await trainer.export(str(tmp_path))
        trainer.learner.pack(pushed)  # type: ignore[arg-type]
        reference = await start_reference(tmp_path)
        return await reference.forward(ids, max_req_tokens=1, return_logprobs=False)

    got = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(pushed[name], exported[name]) for name in pushed)
    before = load_file(tiny_llama / "model.safetensors")
    assert set(exported) == set(before)
    assert not torch.equal(before["model.norm.weight"], exported["model.norm.weight"].float())
    with torch.no_grad():
        want = model.float()(ids).logits[:, :-1]
    assert (got - want).abs().max() < 1e-4
    assert (tmp_path / "tokenizer.json").is_file()


def test_a_loss_that_is_not_finite_names_the_episode_and_leaves_the_weights(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, targets = batch_of(completion_groups())
    advantages = targets.advantages.clone()
    advantages[3] = torch.nan
    broken = dataclasses.replace(targets, advantages=advantages)
    training = {"max_skipped_steps": 1, "bad_batch_folder": str(tmp_path)}

    async def main() -> None:
        trainer = await start_trainer(tiny_llama, WeightedLogprobs(), training=training)
        await trainer.train_step([inputs], [targets])
        before = [tensor.clone() for tensor in trainer.learner.tensors()]
        assert (await trainer.train_step([inputs], [broken])).metrics == {"skipped": 1.0}
        with pytest.raises(NotFinite, match="episode episode-3 is not finite.* 2 steps in a row"):
            await trainer.train_step([inputs], [broken])
        assert all(map(torch.equal, before, trainer.learner.tensors()))
        assert (await trainer.progress()).num_steps == 1
        assert "step 2 is skipped: the loss of episode episode-3 is not finite" in caplog.text
        bad = load_bad_batch(tmp_path / "step-2.attempt-1.pt")
        assert bad.episode_ids == ["episode-3"]
        [(kept, _)] = bad.batches
        assert torch.equal(kept.input_ids, inputs.input_ids)
        assert (await trainer.train_step([inputs], [targets])).metrics["num_tokens"] == 27

    asyncio.run(main())


def test_a_gradient_that_is_not_finite_is_reported(tiny_llama: Path) -> None:
    inputs, targets = batch_of(completion_groups())

    async def main() -> None:
        trainer = await start_trainer(tiny_llama, InfiniteSlope(), training={"max_skipped_steps": 0})
        await trainer.train_step([inputs], [targets])

    with pytest.raises(NotFinite, match="the gradient of episodes episode-0, episode-1, .* is not finite"):
        asyncio.run(main())


def test_text_that_the_model_can_not_read_is_an_error(tiny_llama: Path) -> None:
    inputs, targets = batch_of(completion_groups(lengths=((70,),)))

    async def main() -> None:
        trainer = await start_trainer(tiny_llama, WeightedLogprobs())
        with pytest.raises(ForgeError, match="has 74 tokens, training.seq_len is 64"):
            await trainer.train_step([inputs], [targets])
        short, told = batch_of(completion_groups())
        for batch in (
            (dataclasses.replace(short, input_ids=short.input_ids + 512), told),
            (short, dataclasses.replace(told, target_ids=told.target_ids + 512)),
        ):
            with pytest.raises(ForgeError, match=r"must lie in \[0, 512\), .* got [0-9]+: tokenize"):
                await trainer.train_step([batch[0]], [batch[1]])
        with pytest.raises(ForgeError, match=r"must lie in \[0, 512\), .* got -1: tokenize"):
            await trainer.score([5, -1])

    asyncio.run(main())


def test_one_batch_for_each_rank_is_asked_for(tiny_llama: Path) -> None:
    inputs, targets = batch_of(completion_groups())

    async def main() -> None:
        trainer = await start_trainer(tiny_llama, WeightedLogprobs())
        await trainer.train_step([inputs, inputs], [targets, targets])

    with pytest.raises(ForgeError, match="1 data-parallel ranks .* got 2 inputs and 2 targets"):
        asyncio.run(main())
