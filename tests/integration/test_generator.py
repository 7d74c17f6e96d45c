"""The generator on the real vLLM, Monarch and TorchStore, against transformers' forward in fp32."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.actors.generator import Generator
from forge.controller import Runtime
from forge.data_models import Completion
from forge.errors import ConfigError, FanoutError, ForgeError, PromptTooLong, WeightsMismatch
from forge.weights import close_store
from tests.integration.generators import MAX_MODEL_LEN, PROMPT, Model, engine_config

SEED = 5


class Running:
    """Both generators on one event loop, which lives as long as the tests of this file."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.run = run

    async def start(self, tied: Path, untied: Path) -> None:
        options = {"env": {"OMP_NUM_THREADS": "1"}}
        sampling = {"n": 2, "max_tokens": 24, "temperature": 1.0}
        service, twin, actor = await asyncio.gather(
            Generator.options(num_replicas=2, mesh_name="tied", **options).as_service(
                engine_config(tied), sampling, seed=SEED
            ),
            Generator.options(mesh_name="twin", **options).as_actor(engine_config(tied), sampling, seed=SEED),
            Generator.options(mesh_name="untied", **options).as_actor(engine_config(untied), sampling),
        )
        self.first_answers = await service.generate.fanout(PROMPT)
        self.twin_answer = await twin.generate.call_one(PROMPT)
        await twin.shutdown()
        self.models = {"tied": Model(service, tied), "untied": Model(actor, untied)}


@pytest.fixture(scope="module")
def running(tiny_llama: Path, tiny_qwen3: Path) -> Iterator[Running]:
    async def close(runtime: Runtime) -> None:
        await runtime.aclose()
        await close_store()

    with asyncio.Runner() as runner:
        runtime = runner.run(Runtime().__aenter__())
        try:
            started = Running(runner.run)
            runner.run(started.start(tiny_llama, tiny_qwen3))
            yield started
        finally:
            runner.run(close(runtime))


@pytest.fixture(params=["tied", "untied"])
def model(running: Running, request: pytest.FixtureRequest) -> Model:
    """Each family with the weights of its folder."""
    model = running.models[request.param]
    running.run(model.update(model.original))
    return model


def test_replicas_sample_differently_and_the_same_in_every_run(running: Running) -> None:
    first, second = running.first_answers
    ids = [[c.token_ids.tolist() for c in answer] for answer in (first, second, running.twin_answer)]
    assert ids[0] == ids[2], "the same seed and replica in another process"
    assert ids[0] != ids[1]
    assert ids[0][0] != ids[0][1], "completions of one prompt"
    assert {c.generator_version for c in first} == {0}
    assert running.models["tied"].gap(first, running.models["tied"].original) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(
    running: Running, model: Model, temperature: float
) -> None:
    completions = running.run(model.generator.generate.route(PROMPT, n=3, temperature=temperature))
    assert len(completions) == 3
    assert {c.temperature for c in completions} == {temperature}
    assert all(
        c.logprobs.dtype == torch.float32 and c.logprobs.shape == c.token_ids.shape for c in completions
    )
    assert model.gap(completions, model.original) < 1e-4


def test_new_weights_are_sampled_from_and_old_cache_is_not(running: Running, model: Model) -> None:
    prompt = PROMPT * 8  # several blocks, so that a stale prefix would be found
    running.run(model.generator.generate.fanout(prompt))
    for seed in (1, 2):
        weights = model.changed(seed)
        version = running.run(model.update(weights))
        for completions in running.run(model.generator.generate.fanout(prompt)):
            assert model.gap(completions, weights) < 1e-4
            assert model.gap(completions, model.original) > 0.1
            assert {c.generator_version for c in completions} == {version}
        assert set(running.run(model.generator.version.fanout())) == {version}


def test_the_output_layer_follows_the_embedding_when_only_that_changes(
    running: Running, model: Model
) -> None:
    weights = dict(model.original)
    name = "model.embed_tokens.weight"
    weights[name] = model.changed(3)[name]
    running.run(model.update(weights))
    completions = running.run(model.generator.generate.route(PROMPT))
    assert model.gap(completions, weights) < 1e-4


def test_tokens_of_a_running_call_keep_the_version_that_sampled_them(running: Running, model: Model) -> None:
    weights = model.changed(4)

    async def scenario() -> tuple[list[Completion], int, int]:
        before = (await model.generator.version.fanout())[0]
        call = asyncio.create_task(
            model.generator.generate.route(PROMPT * 5, n=3, max_tokens=800, ignore_eos=True)
        )
        await asyncio.sleep(0.5)
        after = await model.update(weights)
        assert not call.done()
        return await call, before, after

    completions, before, after = running.run(scenario())
    for completion in completions:
        assert completion.token_versions is not None
        old = completion.token_versions == before
        assert completion.generator_version == before
        assert 0 < int(old.sum()) < 800 and set(completion.token_versions[~old].tolist()) == {after}
        assert bool(old[: int(old.sum())].all()), "old tokens come first"
        for weights_then, tokens in ((model.original, old), (weights, ~old)):
            gap = (completion.logprobs - model.logprobs(completion, weights_then)).abs()
            assert float(gap[tokens].max()) < 2e-4


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "head"])
def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    running: Running, model: Model, fault: str
) -> None:
    weights = model.changed(6)
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.layers.2.self_attn.k_proj.weight"] = weights[name]
    elif fault == "shape":
        weights[name] = weights[name][:, :-1].contiguous()
    else:
        name = "lm_head.weight"
        weights[name] = model.changed(7)["model.embed_tokens.weight"]
        if "lm_head.weight" in model.original:
            pytest.skip("an untied model has an output layer of its own")
    before = running.run(model.generator.version.fanout())
    kind = FanoutError if len(before) > 1 else WeightsMismatch
    with pytest.raises(kind, match="layers.2" if fault == "unknown" else name):
        running.run(model.update(weights))
    assert running.run(model.generator.version.fanout()) == before
    assert model.gap(running.run(model.generator.generate.route(PROMPT)), model.original) < 1e-4


def test_weights_in_bfloat16_are_loaded_as_their_values(running: Running, model: Model) -> None:
    rounded = {name: p.bfloat16() for name, p in model.changed(8).items()}
    running.run(model.update(rounded))
    completions = running.run(model.generator.generate.route(PROMPT))
    assert model.gap(completions, {name: p.float() for name, p in rounded.items()}) < 1e-4


def test_weights_that_are_not_finite_are_an_error_of_the_call(running: Running, model: Model) -> None:
    weights = dict(model.original)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    version = running.run(model.update(weights))
    with pytest.raises(ForgeError, match=f"version {version} .* not finite"):
        running.run(model.generator.generate.route(PROMPT))
    running.run(model.update(model.original))
    assert running.run(model.generator.generate.route(PROMPT))


def test_a_short_call_overtakes_a_long_one_on_the_same_engine(running: Running) -> None:
    model = running.models["untied"]

    async def scenario() -> None:
        long = asyncio.create_task(
            model.generator.generate.call_one(PROMPT, n=1, max_tokens=900, ignore_eos=True)
        )
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(
            *(model.generator.generate.call_one(f"{PROMPT}{i}", n=1, max_tokens=5) for i in range(20))
        )
        assert not long.done()
        assert all(len(answer) == 1 for answer in answers)
        assert len((await long)[0].token_ids) == 900

    running.run(scenario())


def test_completions_come_in_order(running: Running) -> None:
    generate = functools.partial(running.models["untied"].generator.generate.call_one, PROMPT)
    group = running.run(generate(n=4, seed=100))  # vLLM seeds the i-th with 100 + i
    alone = [running.run(generate(n=1, seed=100 + i))[0] for i in range(4)]
    assert [c.token_ids.tolist() for c in group] == [c.token_ids.tolist() for c in alone]


def test_stop_reason_and_text(running: Running) -> None:
    generate = functools.partial(running.models["untied"].generator.generate.call_one, PROMPT, n=1)
    [cut] = running.run(generate(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert cut.stop_reason == "length" and len(cut.token_ids) == 12
    [ended] = running.run(generate(logit_bias={2: 100.0}))
    assert (ended.stop_reason, ended.token_ids.tolist(), ended.text) == ("stop", [2], "")
    assert float(ended.logprobs.abs().max()) < 1e-4
    [stopped] = running.run(generate(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[cut.text[4:6]]))
    assert stopped.stop_reason == "stop" and stopped.text == cut.text[: cut.text.index(cut.text[4:6])]
    assert len(stopped.logprobs) == len(stopped.token_ids) < 12


def test_text_and_its_token_ids_are_the_same_prompt(running: Running) -> None:
    generate = running.models["untied"].generator.generate.call_one
    [of_text] = running.run(generate(PROMPT, n=1, temperature=0.0))
    [of_ids] = running.run(generate(of_text.prompt_ids.tolist(), n=1, temperature=0.0))
    assert of_ids.token_ids.tolist() == of_text.token_ids.tolist()
    assert of_ids.text == of_text.text


def test_a_prompt_that_fills_the_model_is_refused_with_both_lengths(running: Running) -> None:
    generate = running.models["untied"].generator.generate.call_one
    with pytest.raises(PromptTooLong, match=f"{MAX_MODEL_LEN} tokens.* takes {MAX_MODEL_LEN - 1} "):
        running.run(generate([5] * MAX_MODEL_LEN))
    [last] = running.run(generate([5] * (MAX_MODEL_LEN - 1), n=1))
    assert len(last.token_ids) == 1 and last.stop_reason == "length"


def test_bad_requests_say_why_and_the_engine_goes_on(running: Running) -> None:
    generate = running.models["untied"].generator.generate.call_one
    with pytest.raises(ConfigError, match="sampling_config.temprature.*did you mean temperature"):
        running.run(generate(PROMPT, temprature=1.0))
    with pytest.raises(ConfigError, match="n must be at least 1"):
        running.run(generate(PROMPT, n=0))
    with pytest.raises(ForgeError, match="out of vocabulary"):
        running.run(generate([100_000]))
    with pytest.raises(ForgeError, match="vLLM refuses the request"):
        running.run(generate([]))
    assert len(running.run(generate(PROMPT))) == 2


def test_a_wrong_engine_key_is_raised_at_the_start(running: Running, tiny_llama: Path) -> None:
    config = {**engine_config(tiny_llama), "max_model_length": 100}
    with pytest.raises(ConfigError, match="engine_config.max_model_length: did you mean max_model_len?"):
        running.run(Generator.options().as_actor(config, {}))
