"""Losses, one file each; any callable with this signature is one:

(logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics)
"""

from forge.rl.loss.grpo import GRPOLoss
from forge.rl.loss.sft import SFTLoss

__all__ = ["GRPOLoss", "SFTLoss"]
