"""vLLM's answer to a request as Completions."""

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike

from forge.data_models import Completion
from forge.errors import ForgeError


def to_completions(
    output: RequestOutput, sampling: SamplingParams, tokenizer: TokenizerLike
) -> list[Completion]:
    """The n completions of a finished request, in order. ForgeError where a log-probability is not finite."""
    prompt_ids = torch.tensor(output.prompt_token_ids, dtype=torch.int64)
    completions = []
    for sample in sorted(output.outputs, key=lambda sample: sample.index):
        token_ids = torch.tensor(list(sample.token_ids), dtype=torch.int64)
        versions = _versions(sample)
        text = (
            sample.text
            if sampling.detokenize
            else tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        )
        completions.append(
            Completion(
                text=text,
                token_ids=token_ids,
                logprobs=_logprobs(sample, versions),
                metadata={"num_cached_tokens": output.num_cached_tokens or 0},
                prompt_ids=prompt_ids,
                generator_version=int(versions.min()),
                stop_reason=sample.finish_reason,
                temperature=sampling.temperature,
                token_versions=versions,
            )
        )
    return completions


def text_logprobs(output: RequestOutput) -> Tensor:
    """[P - 1] float32: log-probability of each prompt token but the first, given those before it."""
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    return torch.tensor([entry[token].logprob for token, entry in pairs if entry], dtype=torch.float32)


def _versions(sample: CompletionOutput) -> Tensor:
    """[T] the version that each token was sampled under."""
    spans = sample.weight_versions or []
    versions = torch.cat([torch.full((span.end - span.start,), int(span.version)) for span in spans])
    assert len(versions) == len(sample.token_ids), f"{len(versions)} versions, {len(sample.token_ids)} tokens"
    return versions


def _logprobs(sample: CompletionOutput, versions: Tensor) -> Tensor:
    """[T] float32"""
    flat = sample.logprobs
    assert isinstance(flat, FlatLogprobs) and flat.token_ids == list(sample.token_ids)
    logprobs = torch.tensor(flat.logprobs, dtype=torch.float32)
    bad = (~logprobs.isfinite()).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ForgeError(
            f"token {at} of a completion has log-probability {logprobs[at]}: the weights of version "
            f"{versions[at]} hold or produce values that are not finite"
        )
    return logprobs
