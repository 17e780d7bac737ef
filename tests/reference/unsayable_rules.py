"""Which 400s a JSON Schema cannot say, each by its code, its field and its whole message.

A rule between fields, or one of the model's. Anything else that a valid case of the document is refused with is a fault
of the document.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

# Codes of valid requests that this model or this User cannot be served, by the fields that they name.
NAMED: Final = {
    "model_not_found": r"model",
    "context_length_exceeded": r"max_tokens|prompt(\.\d+)?",
    "activation_prompt_too_long": r"prompt",
    "full_vocab_prompt_too_long": r"prompt(\.\d+)?",
    "corpus_too_large": r"prompts",
}
_N: Final = r"[\d,]+"
_MODEL: Final = r"[\w.-]+"
_SHAPE: Final = r"[(\[][\d, ]+[)\]]"
# What a tensor's refusal says of its bytes, and its end.
_TAKES: Final = rf"(, and shape {_SHAPE} of \w+ takes {_N})?"
_END: Final = rf"( \(data has {_N} bytes( of zstd)?{_TAKES}\))?\."
_VECTOR: Final = r"apply_steering_vectors\.\d+"
_TENSOR: Final = rf"({_VECTOR}\.activations|project_onto)"
_LAST: Final = r"must be at most -?[\d,]+: the last position that goes through the model"

# `invalid_request`: the field, and what its message says after the field's name.
_RULES: Final[dict[str, tuple[str, ...]]] = {
    r"best_of": (rf"must be null or equal to n \({_N}\): vLLM dropped best_of\.",),
    r"max_tokens": (
        r"is required with several prompts or n over 1\.",
        r"may be 0 only with echo\.",
        rf"\({_N}\) times {_N} prompts times n {_N} is {_N}; at most {_N} is taken\.",
        rf"must be at most {_N} here: the activations of {_N} layers are taken for at most {_N} tokens, generated ones "
        r"included\.",
    ),
    r"min_tokens": (rf"must be at most max_tokens \({_N}\)\.", rf"must be at most {_N}: what fits\."),
    r"logprob_token_ids": (r"needs logprobs\.",),
    r"stream_options": (r"needs stream\.",),
    r"prompt_logprobs": (r"can't be streamed\.",),
    r"output_residual_stream": (r"can't be streamed\.", r"takes one prompt and n 1\."),
    r"apply_steering_vectors": (r"takes one prompt and n 1\.",),
    r"(prompt(\.\d+)?|stop_token_ids|allowed_token_ids|logprob_token_ids|logit_bias)\.\d+": (
        rf"is token id {_N}, and the vocabulary's ids are 0 to {_N}\.",
    ),
    r"prompt(\.\d+)?": (
        r"has no tokens: the tokenizer makes none of this text\.",
        rf"has a token that {_MODEL} has no embedding for\.",
    ),
    r"output_residual_stream\.\d+": (rf"is {_N}, and {_MODEL} has layers 0 to {_N}\.",),
    r"stream": (r"must be false: a Job's result is fetched when it is there\.",),
    r"Idempotency-Key": (r"is not taken with stream\.",),
    rf"{_TENSOR}\.original_dtype": (rf"must be torch\.\w+ with dtype \w+{_END}",),
    rf"{_TENSOR}\.data": (
        rf"is not base64: it has {_N} characters{_TAKES}\.",
        rf"has {_N} bytes{_TAKES}\.",
        rf"holds a value that is not finite, among its {_N} bytes\.",
        rf"decompresses to more: its {_N} bytes of zstd hold over {_N}{_TAKES}\.",
        rf"is not (one whole zstd frame|zstd): it has {_N} bytes{_TAKES}\.",
    ),
    rf"{_VECTOR}\.activations\.data": (rf"holds a zero vector, which norm_match can't scale{_END}",),
    rf"{_VECTOR}\.activations\.shape": (
        rf"must be \(layers, hidden\) or \(layers, positions, hidden\){_END}",
        rf"has {_N} layers, and layer_indices has {_N}{_END}",
        rf"has {_N} positions, and position_indices has {_N}{_END}",
        rf"ends in {_N}, and the hidden size of {_MODEL} is {_N}{_END}",
        rf"asks for more than {_N} bytes in all vectors up to this: {_N}{_END}",
    ),
    rf"{_VECTOR}\.layer_indices\.\d+": (rf"must be under {_N}: {_MODEL} has layers 0 to {_N}\.",),
    rf"{_VECTOR}\.position_indices": (r"is required with a tensor of 3 axes\.", r"needs a tensor of 3 axes\."),
    rf"{_VECTOR}\.position_indices\.\d+": (rf"{_LAST}\.",),
    rf"{_VECTOR}\.position_spans": (r"excludes position_indices\.", r"needs a tensor of 2 axes\."),
    rf"{_VECTOR}\.position_spans\.\d+": (r"must start before it ends\.", r"overlaps another span\."),
    rf"{_VECTOR}\.position_spans\.\d+\.1": (rf"{_LAST}, plus one\.",),
    r"project_onto\.shape": (rf"must be \[1 to {_N} directions, {_N} hidden\], not {_SHAPE}{_END}",),
    r"project_onto\.data": (rf"holds only zeros in the {_N} bytes of direction {_N}, which has no length to scale\.",),
    r"layers\.\d+": (rf"is {_N}; the model has {_N} layers, 0 to {_N}\.",),
    r"after": (r"is not the id of one of your (Job|Harvest job)s\.",),
}


def is_unsayable(error: dict[str, Any], *, path: str) -> bool:
    """Whether a 400's error object, of a route, is one that no schema can forestall."""
    code, param, message = error["code"], error["param"], error["message"]
    if path == "/v1/chat/completions":
        return bool(code == "chat_completions_unsupported" and param is None)
    if param is None:
        return False
    if code != "invalid_request":
        return code in NAMED and _is(NAMED[code], param)
    rules = (rules for field, rules in _RULES.items() if _is(field, param))
    return any(_is_one_of(each, message.removeprefix(f"{param} ")) for each in rules)


def _is_one_of(patterns: Iterable[str], text: str) -> bool:
    return any(_is(pattern, text) for pattern in patterns)


def _is(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.ASCII) is not None
