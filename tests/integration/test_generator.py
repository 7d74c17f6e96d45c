"""The generator on the real vLLM, Monarch and TorchStore, against transformers' forward in fp32."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.actors.generator import Generator
from forge.controller import Runtime, Service
from forge.data_models import Completion
from forge.errors import ActorFailure, ConfigError, FanoutError, ForgeError, PromptTooLong, WeightsMismatch
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
            Generator.options(mesh_name="twin", **options).as_actor(
                engine_config(tied), sampling, seed=SEED, in_flight="keep"
            ),
            Generator.options(mesh_name="untied", **options).as_actor(engine_config(untied), sampling),
        )
        self.first_answers = await service.generate.fanout(PROMPT)
        self.twin_answer = await twin.generate.call_one(PROMPT)
        self.models = {"tied": Model(service, tied), "untied": Model(actor, untied)}
        self.keeping = Model(twin, tied)


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


def test_asleep_it_samples_nothing_and_takes_new_weights_and_calls_go_on_when_it_wakes(
    running: Running, model: Model
) -> None:
    weights = model.changed(9)

    async def scenario() -> tuple[list[Completion], list[Completion], int]:
        endpoints = model.generator
        call = asyncio.create_task(endpoints.generate.route(PROMPT * 5, n=2, max_tokens=800, ignore_eos=True))
        await asyncio.sleep(0.3)
        for _ in range(2):
            await endpoints.sleep.fanout()
        version = await model.update(weights)
        assert not call.done()
        late = asyncio.create_task(endpoints.generate.route(PROMPT))
        done, _ = await asyncio.wait({call, late}, timeout=0.3)
        assert not done
        for _ in range(2):
            await endpoints.wake.fanout()
        return await call, await late, version

    first, late, version = running.run(scenario())
    assert {c.generator_version for c in late} == {version} and model.gap(late, weights) < 1e-4
    for completion in first:
        assert completion.token_versions is not None and len(completion.token_ids) == 800
        new = completion.token_versions == version
        assert 0 < int(new.sum()) < 800
        for tokens, of in ((new, weights), (~new, model.original)):
            gap = (completion.logprobs - model.logprobs(completion, of)).abs()
            assert float(gap[tokens].max()) < 2e-4


def test_kept_cache_of_old_weights_serves_running_calls_only(running: Running) -> None:
    model = running.keeping
    generate = model.generator.generate.route
    weights = model.changed(5)
    prompt, other = PROMPT * 8, f"So. {PROMPT * 8}"  # several blocks of the KV cache, none in common

    async def scenario() -> list[list[Completion]]:
        await model.update(model.original)  # the first takes longer: it finds the store
        for text in (prompt, other):
            await generate(text)
            [again] = await generate(text, n=1)
            assert again.metadata["num_cached_tokens"] >= 32, "without new weights, the cache is used"
        calls = [
            asyncio.create_task(generate(prompt, n=32, max_tokens=800, ignore_eos=True)) for _ in range(2)
        ]
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(generate(other, n=1))  # for a place among the 64 that run
        await asyncio.sleep(0.1)
        await model.update(weights)
        calls[0].cancel()
        answers = [await generate(prompt, n=1), await waiting, await generate(prompt, n=1)]
        assert not calls[1].done(), "it kept its blocks"
        calls[1].cancel()
        return answers

    fresh, waited, again = running.run(scenario())
    [version] = {c.generator_version for c in fresh}
    assert [answer[0].metadata["num_cached_tokens"] for answer in (fresh, waited)] == [0, 0]
    assert again[0].metadata["num_cached_tokens"] >= 32
    for completions in (fresh, waited, again):
        assert {c.generator_version for c in completions} == {version}
        assert model.gap(completions, weights) < 1e-3


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "head"])
def test_weights_of_another_model_are_named_and_fence_the_replicas_off(
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
    is_service = isinstance(model.generator, Service)
    named = "layers.2" if fault == "unknown" else name
    with pytest.raises(FanoutError if is_service else WeightsMismatch, match=rf"tied\[.*{named}"):
        running.run(model.update(weights))
    assert {replica.version for replica in running.run(model.generator.replicas())} == {None}
    if not is_service:  # that of a service would be replaced
        with pytest.raises(ActorFailure, match=named):
            running.run(model.generator.generate.route(PROMPT))
    running.run(model.update(model.original))
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


def test_calls_with_seeds_may_have_more_tokens_together_than_a_step_takes(running: Running) -> None:
    generate = running.models["untied"].generator.generate.call_one

    async def scenario() -> list[list[Completion]]:
        prompts = [f"{i}. {PROMPT * 70}" for i in range(12)]
        calls = [generate(prompt, n=1, seed=i, max_tokens=2) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*calls)

    answers = running.run(scenario())
    assert sum(len(answer[0].prompt_ids) for answer in answers) > 5000
    [alone] = running.run(generate(f"3. {PROMPT * 70}", n=1, seed=3, max_tokens=2))
    assert alone.token_ids.tolist() == answers[3][0].token_ids.tolist()


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
