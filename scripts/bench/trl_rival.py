"""The rival's half of grpo_vs_trl: TRL's GRPOTrainer, in an environment of its own.

    python trl_rival.py SETTINGS.json OUT.jsonl
writes a line a step: {"step", "time", "reward", "tokens"}; the first line, step 0, is when training starts.
"""

import json
import sys
import time

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(settings_path: str, out_path: str) -> None:
    with open(settings_path) as file:
        s = json.load(file)
    torch.set_num_threads(s["threads"])
    rows = [{"prompt": r["request"], "target": r["target"]} for r in s["prompts"]]
    rewards: list[float] = []
    tokens: list[int] = []

    def exact_match(prompts, completions, target, completion_ids, **_):
        from_text = [float(reward(text, want)) for text, want in zip(completions, target, strict=True)]
        rewards.extend(from_text)
        tokens.extend(len(ids) for ids in completion_ids)
        return from_text

    sys.path.insert(0, s["source_path"])  # forge.data.rewards needs nothing but the standard library
    from forge.data.rewards import MathReward

    grade = MathReward()

    def reward(text: str, want: str) -> float:
        return grade("", text, want)

    class Log(TrainerCallback):
        def __init__(self) -> None:
            self.file = open(out_path, "w")  # noqa: SIM115 - open for the whole run

        def write(self, step: int) -> None:
            mean = sum(rewards) / len(rewards) if rewards else None
            line = {
                "step": step,
                "time": time.time(),
                "reward": mean,
                "tokens": sum(tokens),
                "samples": len(rewards),
            }
            print(json.dumps(line), file=self.file, flush=True)
            rewards.clear()
            tokens.clear()

        def on_train_begin(self, args, state, control, **_):
            self.write(0)

        def on_step_end(self, args, state, control, **_):
            self.write(state.global_step)

    config = GRPOConfig(
        output_dir=s["output_dir"],
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=s["batch_size"] * s["n_samples"],
        gradient_accumulation_steps=1,
        num_generations=s["n_samples"],
        max_completion_length=s["max_tokens"],
        temperature=s["temperature"],
        learning_rate=s["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=s["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=s["max_grad_norm"],
        max_steps=s["steps"],
        beta=s["beta"],
        epsilon=s["clip_low"],
        epsilon_high=s["clip_high"],
        loss_type="dr_grpo",
        bf16=s["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        seed=s["seed"],
    )
    trainer = GRPOTrainer(
        model=s["model"],
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Log()],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
