"""Losses, one file each, that need no more than PyTorch. Any callable with this signature is one:

    (logits, target_ids, advantages, generator_logprobs, loss_mask, ref_logprobs) -> (loss, metrics)

logits [N, T, V], advantages [N] or [N, T], the others [N, T]; loss a scalar, metrics numbers by name.
What else a loss may have, and a trainer looks for:

- `normalize_by`: "sequences" (the default) or "tokens", what the loss is a mean over; the trainer weighs
  micro-batches by it. `token_means`: names of metrics that are means over tokens in any case.
- `whole_batch_metrics(metrics)`: what those of a whole batch, merged from its parts', become.
- `from_logprobs`: the same from log-probabilities and entropies; the trainer then makes no logits at all.
- a keyword `proximal_logprobs` [N, T]: of the policy when the first of several updates on a batch began.
- `after_step(metrics)`: called on all ranks after each update, with the metrics of its whole batch; the one
  place where a loss may change. Its `state_dict` and `load_state_dict` carry what changes over kills and
  resumes: it must have them then.

A policy gradient is shorter as a subclass of `PolicyLoss`: it says what becomes of ratio and advantage.
"""

from forge.rl.loss.cispo import CISPOLoss
from forge.rl.loss.correction import OffPolicyCorrection
from forge.rl.loss.dapo import DAPOLoss
from forge.rl.loss.grpo import GRPOLoss
from forge.rl.loss.gspo import GSPOLoss
from forge.rl.loss.ops import AggType
from forge.rl.loss.policy import PolicyLoss
from forge.rl.loss.ppo import PPOLoss
from forge.rl.loss.registry import LOSSES, Loss, arguments_of, loss_class, make_loss
from forge.rl.loss.reinforce import REINFORCELoss
from forge.rl.loss.sapo import SAPOLoss
from forge.rl.loss.sft import SFTLoss
from forge.rl.loss.token_loss import TokenLoss

__all__ = [
    "LOSSES",
    "AggType",
    "CISPOLoss",
    "DAPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "Loss",
    "OffPolicyCorrection",
    "PPOLoss",
    "PolicyLoss",
    "REINFORCELoss",
    "SAPOLoss",
    "SFTLoss",
    "TokenLoss",
    "arguments_of",
    "loss_class",
    "make_loss",
]
