"""Supervised fine-tuning: read conversations, learn the assistant's turns, validate, answer a few questions.

python -m apps.sft.main --config apps/sft/smollm2_135m.yaml
"""

import asyncio
import json
import math
import sys

from apps.sft.config import SFTConfig, load_config
from apps.sft.machines import Machines, placement, start
from apps.sft.position import Place, place_of
from forge.app import SAMPLES, Run, run_app
from forge.controller import Service
from forge.data_models import ForwardBackwardResult
from forge.grace import StopRequest
from forge.observability import phase, record
from forge.observability.view import SFT_VIEW
from forge.runs import CHECKPOINTS, has_checkpoint


async def learn(m: Machines, place: Place) -> Place:
    """One optimizer step on the next conversations; returns where the step after it begins."""
    with phase("data"):
        batch = await m.dataset.batch.call_one(place.position)
    after = place.after(batch.after)
    with phase("train"):
        await m.trainer.train_step.call(batch.inputs, state=after.state())
    return after


async def validate(m: Machines, run: Run, step: int) -> None:
    """The loss on the conversations held out, and answers to a few of their questions.

    May be cancelled, but a call to the trainer that has begun goes on: were it to end on some ranks only, the
    others would wait for them.
    """
    if m.validation:
        with phase("validate"):
            results = [await asyncio.shield(m.trainer.evaluate.route(batch)) for batch in m.validation]
            record("validation", **mean_loss(results))
    if m.generator is not None and m.questions:
        with phase("sample"):
            await answer(m, m.generator, run, step)


async def answer(m: Machines, generator: Service, run: Run, step: int) -> None:
    """The weights as they are now answer the questions; answers go to the console and to samples.jsonl."""
    if step > 0:
        await asyncio.shield(m.trainer.push_weights.call(step))
        await generator.update_weights.fanout(step)
    completions = await asyncio.gather(*(generator.generate.route(q.prompt) for q in m.questions))
    with (run.folder / SAMPLES).open("a", encoding="utf-8") as file:
        for question, [completion] in zip(m.questions, completions, strict=True):
            print(f"  step {step}: {question.text!r} -> {completion.text!r}", flush=True)
            sample = {"step": step, "question": question.text, "answer": completion.text}
            file.write(json.dumps({**sample, "reference": question.answer}, ensure_ascii=False) + "\n")


def mean_loss(results: list[ForwardBackwardResult]) -> dict[str, float]:
    """Over all tokens of several batches, in nats; and its exponential."""
    num_tokens = sum(result.metrics["num_tokens"] for result in results)
    loss = sum(result.loss * result.metrics["num_tokens"] for result in results) / num_tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def is_over(m: Machines, place: Place) -> bool:
    """Whether all steps are done, or the epochs at their end: conversations may have been passed over."""
    at = place.position
    return place.step >= m.num_steps or (
        m.end is not None and (at.epoch, at.index) >= (m.end.epoch, m.end.index)
    )


def is_validated(config: SFTConfig, m: Machines, place: Place) -> bool:
    """Whether there is a validation after this step."""
    return place.step % config.validation.every == 0 or is_over(m, place)


async def save(m: Machines, run: Run, place: Place) -> None:
    """A checkpoint of this step, unless there is one."""
    if not has_checkpoint(run.folder, place.step):
        await m.trainer.save_checkpoint.call(place.state())


async def main(config: SFTConfig, run: Run) -> None:
    """Steps over the epochs with validations in between; the trained model ends as a Hugging Face folder."""
    m = await start(config, run.folder / CHECKPOINTS)
    place = place_of(await m.trainer.progress.route(), config, m.sizes)
    run.started(steps=m.num_steps, done=place.step)
    print(m.sizes, flush=True)
    if place.step == 0 or (
        m.validation and is_validated(config, m, place) and run.reopen(place.step, "validation/loss")
    ):
        await validate(m, run, place.step)
        await run.report(place.step)
    with StopRequest() as stop:
        while not is_over(m, place) and not stop.asked:
            place = await learn(m, place)
            if is_validated(config, m, place):
                await stop.unless_asked(validate(m, run, place.step))
            await run.report(place.step)
        if place.step > 0:
            await save(m, run, place)
    if stop.asked:
        run.interrupted()
    await m.trainer.export.call(str(run.folder / "model"))


if __name__ == "__main__":
    sys.exit(run_app(main, load_config, placement, view=SFT_VIEW))
