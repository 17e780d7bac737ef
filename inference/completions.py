"""From the body of `POST /v1/completions` to a CompletionWork: every field, bound and rule of the API, in its order."""

import time
from typing import Any, Final

from django.conf import settings

from acsinfra.core.errors import ApiError, ErrorCode, invalid
from acsinfra.core.fields import FieldFault, within
from acsinfra.core.threads import in_thread_if
from inference.selectors import Catalogue, CatalogueModel
from inference.serializers import MAX_TOKENS, CompletionRequestSerializer, GivenPrompts
from inference.steering import check_against_model, check_positions, decode_vectors, is_long_to_decode
from inference.tokenization import TextTooLong
from inference.wire import CompletionWork, Sampling, SteeringVector

Fields = dict[str, Any]
Prompts = tuple[tuple[int, ...], ...]
WHOLE_VOCABULARY: Final = -1


async def prepare_completion(
    body: dict[str, Any], *, catalogue: Catalogue, request_id: str, is_large: bool
) -> CompletionWork:
    """Check `body` (parsed JSON), tokenise its prompts and decode its steering vectors.

    The fields come first, then the model, then what depends on it: ids inside the vocabulary, lengths, layers. Raises
    ApiError, whose `param` names the field. Whether an engine is there is not looked at. Where the body `is_large`,
    its fields are checked in a thread.
    """
    fields: Fields = await in_thread_if(is_large, CompletionRequestSerializer.validated, body)
    model = catalogue.get(fields["model"])
    given: GivenPrompts = fields["prompt"]
    vectors: list[Fields] = fields.get("apply_steering_vectors") or []
    _refuse_hopeless_ids(given, model)
    _check_token_ids(fields, given, model)
    layers = _layers_asked(fields, model)
    _named("apply_steering_vectors", check_against_model, vectors, model)

    prompts = await _tokenise(given, fields["add_special_tokens"], model)
    max_tokens = _max_tokens(fields, given, prompts, model, layers)
    _check_whole_vocabulary(fields, given, prompts, model)
    last_position = len(prompts[0]) + max(1, max_tokens) - 2
    _named("apply_steering_vectors", check_positions, vectors, last_position)
    steering = await _decode(vectors)

    now = time.time()
    options = fields.get("stream_options") or {}
    return CompletionWork(
        request_id=request_id,
        model=model.name,
        served_model_name=model.served_model_name,
        created=int(now),
        deadline=now + settings.ENGINE_TIME_LIMIT.total_seconds(),
        prompts=prompts,
        prompt_texts=tuple(given.texts) or (None,) * len(prompts),
        sampling=_sampling(fields, max_tokens),
        hold_tokens=sum(map(len, prompts)) + len(prompts) * fields["n"] * max_tokens,
        echo=fields["echo"],
        stream=fields["stream"],
        include_usage=options.get("include_usage", False),
        return_token_ids=fields["return_token_ids"],
        capture_layers=layers,
        steering=steering,
        is_steered=bool(vectors),
        user=fields.get("user"),
    )


def _refuse_hopeless_ids(given: GivenPrompts, model: CatalogueModel) -> None:
    """Refuse ids past the context before any of them is looked at: a body has room for millions."""
    longest = max(range(len(given.token_ids)), key=lambda index: len(given.token_ids[index]), default=0)
    n_tokens = len(given.token_ids[longest]) if given.token_ids else 0
    if n_tokens >= model.max_model_len:
        raise _prompt_too_long(given.param(longest), f"{n_tokens:,}", model)


def _check_token_ids(fields: Fields, given: GivenPrompts, model: CatalogueModel) -> None:
    last = model.vocab_size - 1
    if given.token_ids and max(map(max, given.token_ids)) > last:
        for index, ids in enumerate(given.token_ids):
            _check_in_vocabulary(ids, last, given.param(index))
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        _check_in_vocabulary(fields.get(name) or [], last, name)
    for token_id in fields.get("logit_bias") or ():
        if token_id > last:
            raise _outside_vocabulary(f"logit_bias.{token_id}", token_id, last)


def _check_in_vocabulary(ids: list[int], last: int, param: str) -> None:
    if not ids or max(ids) <= last:
        return
    at = next(at for at, token_id in enumerate(ids) if token_id > last)
    raise _outside_vocabulary(f"{param}.{at}", ids[at], last)


def _outside_vocabulary(param: str, token_id: int, last: int) -> ApiError:
    return invalid(f"{param} is token id {token_id}, and the vocabulary's ids are 0 to {last}.", param=param)


def _layers_asked(fields: Fields, model: CatalogueModel) -> tuple[int, ...]:
    """The layers to capture, ascending; empty for none."""
    asked = fields.get("output_residual_stream", False)
    if isinstance(asked, bool):
        return tuple(range(model.n_layers)) if asked else ()
    for at, layer in enumerate(asked):
        if layer >= model.n_layers:
            param = f"output_residual_stream.{at}"
            raise invalid(f"{param} is {layer}, and {model.name} has layers 0 to {model.n_layers - 1}.", param=param)
    return tuple(sorted(asked))


async def _tokenise(given: GivenPrompts, add_special_tokens: bool, model: CatalogueModel) -> Prompts:
    if given.token_ids:
        return tuple(map(tuple, given.token_ids))
    tokenizer = await model.tokenizer()
    try:
        prompts = await tokenizer.encode(given.texts, add_special_tokens=add_special_tokens, limit=model.max_model_len)
    except TextTooLong as error:
        raise _prompt_too_long(given.param(error.index), f"at least {error.at_least:,}", model) from None
    for index, ids in enumerate(prompts):
        if not ids:
            param = given.param(index)
            raise invalid(f"{param} has no tokens: the tokenizer makes none of this text.", param=param)
        # A vocabulary larger than the model's would reach past its embeddings.
        if max(ids) >= model.vocab_size:
            param = given.param(index)
            raise invalid(f"{param} has a token that {model.name} has no embedding for.", param=param)
    return prompts


def _max_tokens(
    fields: Fields, given: GivenPrompts, prompts: Prompts, model: CatalogueModel, layers: tuple[int, ...]
) -> int:
    """Check the prompts' lengths, and return `max_tokens` as given or what fits."""
    asked: int | None = fields.get("max_tokens")
    # An engine always makes a token, also where only the prompt is scored.
    needed = max(1, asked or 0)
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    n_tokens, context = len(prompts[longest]), model.max_model_len
    if n_tokens >= context:
        raise _prompt_too_long(given.param(longest), f"{n_tokens:,}", model)
    room = context - n_tokens
    if layers:
        room = min(room, _room_of_capture(n_tokens, layers, model))
    if asked is None:
        max_tokens = min(MAX_TOKENS, room)
        if fields["min_tokens"] > max_tokens:
            raise invalid(f"min_tokens must be at most {max_tokens:,}: what fits.", param="min_tokens")
        return max_tokens
    if n_tokens + needed > context:
        raise ApiError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"The prompt's {n_tokens:,} tokens plus max_tokens {asked:,} are {n_tokens + asked:,}; the context of "
            f"{model.name} is {context:,} tokens.",
            param="max_tokens",
        )
    if needed > room:
        raise invalid(
            f"max_tokens must be at most {room:,} here: the activations of {len(layers)} layers are taken for at most "
            f"{n_tokens + room - 1:,} tokens, generated ones included.",
            param="max_tokens",
        )
    return asked


def _room_of_capture(n_tokens: int, layers: tuple[int, ...], model: CatalogueModel) -> int:
    """How many tokens may be generated so that the whole capture stays within its bytes."""
    cap = model.activation_tokens(len(layers))
    if n_tokens > cap:
        raise ApiError(
            ErrorCode.ACTIVATION_PROMPT_TOO_LONG,
            f"The prompt has {n_tokens:,} tokens; with {len(layers)} of {model.n_layers} layers asked for, at most "
            f"{cap:,} are taken.",
            param="prompt",
        )
    return cap - n_tokens + 1


def _prompt_too_long(param: str, n_tokens: str, model: CatalogueModel) -> ApiError:
    return ApiError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"{param} has {n_tokens} tokens, which leaves no room to generate; the context of {model.name} is "
        f"{model.max_model_len:,} tokens.",
        param=param,
    )


def _check_whole_vocabulary(fields: Fields, given: GivenPrompts, prompts: Prompts, model: CatalogueModel) -> None:
    """Bound what `prompt_logprobs: -1` answers, which is a number for each token of the vocabulary at each position."""
    if fields.get("prompt_logprobs") != WHOLE_VOCABULARY:
        return
    limit = model.full_vocab_max_prompt_tokens
    # Each of the n choices has them.
    total = 0
    for index, ids in enumerate(prompts):
        total += len(ids) * fields["n"]
        if total > limit:
            raise ApiError(
                ErrorCode.FULL_VOCAB_PROMPT_TOO_LONG,
                f"prompt_logprobs -1 is taken for at most {limit:,} prompt tokens in a request to {model.name}, and "
                f"the prompts have {sum(map(len, prompts)) * fields['n']:,} (each of the n choices counts).",
                param=given.param(index),
            )


async def _decode(vectors: list[Fields]) -> tuple[SteeringVector, ...]:
    if not vectors:
        return ()
    try:
        return await in_thread_if(is_long_to_decode(vectors), decode_vectors, vectors)
    except FieldFault as fault:
        raise _as_named(within("apply_steering_vectors", fault)) from None


def _named(name: str, check: Any, vectors: list[Fields], bound: Any) -> None:
    if not vectors:
        return
    try:
        check(vectors, bound)
    except FieldFault as fault:
        raise _as_named(within(name, fault)) from None


def _as_named(fault: ApiError) -> ApiError:
    return invalid(f"{fault.param} {fault.message}", param=fault.param)


def _sampling(fields: Fields, max_tokens: int) -> Sampling:
    logprobs, prompt_logprobs = fields.get("logprobs"), fields.get("prompt_logprobs")
    if fields["echo"] and prompt_logprobs is None:
        prompt_logprobs = logprobs
    return Sampling(
        max_tokens=max_tokens,
        n=fields["n"],
        temperature=fields["temperature"],
        top_p=fields["top_p"],
        top_k=fields["top_k"],
        min_p=fields["min_p"],
        presence_penalty=fields["presence_penalty"],
        frequency_penalty=fields["frequency_penalty"],
        repetition_penalty=fields["repetition_penalty"],
        seed=fields.get("seed"),
        stop=fields.get("stop", ()),
        stop_token_ids=tuple(fields.get("stop_token_ids") or ()),
        include_stop_str_in_output=fields["include_stop_str_in_output"],
        ignore_eos=fields["ignore_eos"],
        min_tokens=fields["min_tokens"],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(fields.get("logprob_token_ids") or ()),
        logit_bias=fields.get("logit_bias") or {},
        allowed_token_ids=tuple(fields.get("allowed_token_ids") or ()),
        skip_special_tokens=fields["skip_special_tokens"],
    )
