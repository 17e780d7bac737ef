"""From the fields of a Completion to vLLM's sampling parameters, and from its logprobs back to ours."""

import itertools
from collections.abc import Iterator
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from inference.wire import PositionLogprobs, Sampling, TokenLogprob

# What vLLM 0.32 allows; past it the worker sets the temperature that was asked for.
_VLLM_MIN_TEMPERATURE, _VLLM_MAX_TEMPERATURE = 0.01, 2.0
_GREEDY_BELOW = 1e-5
# Logits are divided by it in float32: below, they overflow and sampling meets infinity less infinity. It is certain to
# repeat long before.
_MIN_REPETITION_PENALTY = 1e-30
# The rank of a token that was asked for by id and is not among the likeliest: it is not computed.
RANK_UNKNOWN = 0


def make_sampling_params(sampling: Sampling, *, extra_args: dict[str, Any] | None) -> SamplingParams:
    """Return vLLM's parameters for deltas. Raises `ValueError` for what vLLM refuses.

    `max_tokens` 0 becomes 1: the caller drops the token.
    """
    extra_logprobs = len(sampling.logprob_token_ids)
    params = SamplingParams(
        max_tokens=max(1, sampling.max_tokens),
        temperature=clamp_temperature(sampling.temperature),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=max(sampling.repetition_penalty, _MIN_REPETITION_PENALTY),
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        logprobs=None if sampling.logprobs is None else sampling.logprobs + extra_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        skip_special_tokens=sampling.skip_special_tokens,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra_args,
        skip_clone=True,
    )
    # Set afterwards: vLLM refuses greedy n > 1 here, and serves it all the same.
    params.n = sampling.n
    return params


def clamp_temperature(temperature: float) -> float:
    """Return the temperature that vLLM accepts in place of this one; see `needs_own_temperature`."""
    if temperature < _GREEDY_BELOW:
        return 0.0
    return min(max(temperature, _VLLM_MIN_TEMPERATURE), _VLLM_MAX_TEMPERATURE)


def needs_own_temperature(temperature: float) -> bool:
    """Say whether vLLM would refuse or change this temperature, so that the worker has to set it."""
    return temperature >= _GREEDY_BELOW and clamp_temperature(temperature) != temperature


def convert_logprobs(logprobs: FlatLogprobs, sampling: Sampling) -> tuple[PositionLogprobs, ...]:
    """Return a delta's logprobs, a tuple for each generated token: that token first, then the likeliest ones.

    After those stand the tokens of `logprob_token_ids` that are not there yet, with rank `RANK_UNKNOWN`.
    """
    extra = frozenset(sampling.logprob_token_ids)
    top = sampling.logprobs if sampling.logprobs is not None else 0
    positions = (_position(entries) for entries in _iterate_positions(logprobs))
    if not extra:
        return tuple(positions)
    return tuple(_hide_unknown_ranks(position, top=top, extra=extra) for position in positions)


def convert_prompt_logprobs(logprobs: FlatLogprobs) -> tuple[PositionLogprobs | None, ...]:
    """Return a prompt's logprobs, a tuple for each token and None for the first."""
    return tuple(_position(entries) or None for entries in _iterate_positions(logprobs))


def _iterate_positions(logprobs: FlatLogprobs) -> Iterator[Iterator[tuple[int, float, int | None, str | None]]]:
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        yield zip(
            logprobs.token_ids[start:end],
            logprobs.logprobs[start:end],
            logprobs.ranks[start:end],
            logprobs.decoded_tokens[start:end],
            strict=True,
        )


def _position(entries: Iterator[tuple[int, float, int | None, str | None]]) -> PositionLogprobs:
    seen: dict[int, TokenLogprob] = {}
    for token_id, logprob, rank, token in entries:
        if token_id not in seen:
            seen[token_id] = TokenLogprob(token_id, logprob, rank or RANK_UNKNOWN, token or "")
    return tuple(seen.values())


def _hide_unknown_ranks(position: PositionLogprobs, *, top: int, extra: frozenset[int]) -> PositionLogprobs:
    """Drop the ranks that vLLM gave to the extra columns: it counted on through them.

    vLLM merges deltas that nobody fetched yet by token id, so the first token may have such a rank too.
    """
    ranked = sorted(position, key=lambda entry: -entry.logprob)
    rank_of = {entry.token_id: rank for rank, entry in enumerate(itertools.islice(ranked, top), start=1)}
    return tuple(
        TokenLogprob(
            entry.token_id,
            entry.logprob,
            rank_of.get(entry.token_id, RANK_UNKNOWN if entry.token_id in extra else entry.rank),
            entry.token,
        )
        for entry in position
    )
