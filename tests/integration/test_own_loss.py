"""A user's loss as docs/algorithms.md shows it, by its path: through the trainer, for episodes and text."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.data_models import TextTrainBatch
from forge.rl.loss import Loss, make_loss
from tests.integration.trainer_cases import batch_of, completion_groups, gradients_of, start_trainer

PAGE = Path(__file__).parents[2] / "docs/algorithms.md"
BLAME = 0.2


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loss]:
    """The loss that the page shows, as a run's config names it."""
    [code] = re.findall(r'```python\n("""my_pkg/my_module.py""".*?)```', PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 22  # "in twenty lines"
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg/my_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield make_loss({"name": "my_pkg.my_module.MyLoss", "blame": BLAME})
    for name in ("my_pkg.my_module", "my_pkg"):
        del sys.modules[name]


def test_the_loss_of_the_page_trains_on_episodes_and_on_text(own_loss: Loss, tiny_llama: Path) -> None:
    groups = completion_groups()
    inputs, targets = batch_of(groups)
    ids = torch.randint(5, 512, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, 7:] = False
    text = TextTrainBatch(ids, ids.roll(-1, 1), mask, torch.ones(2, 12))

    async def main() -> tuple[float, dict[str, Tensor], float]:
        passes = {"gradient_accumulation_steps": 2}
        trainer = await start_trainer(tiny_llama, own_loss, training=passes)
        learnt = await trainer.forward_backward([inputs], [targets])
        gradients = {name: g.clone() for name, g in gradients_of(trainer).items()}
        return learnt.loss, gradients, (await trainer.evaluate([text])).loss

    loss, gradients, loss_of_text = asyncio.run(main())
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    terms: list[Tensor] = []
    completions = [c for group in groups for c in group]
    for c, advantage in zip(completions, targets.advantages.tolist(), strict=True):
        assert c.prompt_ids is not None
        read = torch.cat([c.prompt_ids, c.token_ids])
        log_p = torch.log_softmax(model(read[None]).logits[0] / c.temperature, -1)
        log_p = log_p[len(c.prompt_ids) - 1 : -1].gather(-1, c.token_ids[:, None])
        terms.append(-log_p[:, 0] * (BLAME * advantage if advantage < 0 else advantage))
    wanted = torch.cat(terms).mean()
    assert loss == pytest.approx(wanted.item(), abs=1e-4)
    wanted.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (gradients[name] - parameter.grad).abs().max() < 1e-4 * max(1.0, parameter.grad.abs().max())
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits, -1).gather(-1, ids.roll(-1, 1)[..., None])[..., 0]
    assert loss_of_text == pytest.approx(-log_p[mask].mean().item(), abs=1e-4)
