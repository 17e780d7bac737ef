"""The fields of `POST /v1/completions`, and of the answers of `GET /v1/models`."""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from django.conf import settings
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from acsinfra.core.errors import ApiError, printable
from acsinfra.core.fields import (
    INT64_MAX,
    FieldFault,
    StrictBooleanField,
    StrictCharField,
    StrictField,
    StrictFloatField,
    StrictIntegerField,
    StrictListField,
    StrictSerializer,
    are_integers_within,
    check_text,
    within,
)
from inference.selectors import MAX_LOGPROBS
from inference.steering import SteeringVectorSerializer

MAX_TOKENS: Final = 32_000
TOKEN_ID: Final = StrictIntegerField(min_value=0)
# What OpenAPI says of a text that must not be empty.
TEXT_SCHEMA: Final = {"type": "string", "minLength": 1, "pattern": r"^[^\u0000]*$"}
TOKEN_IDS_SCHEMA: Final = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": INT64_MAX},
    "minItems": 1,
}
LOGIT_BIAS_KEY: Final = re.compile(r"(0|[1-9][0-9]{0,9})")


@dataclass(frozen=True)
class GivenPrompts:
    """The prompts of a request, all texts or all token ids; `is_batch` when they came in a list of their own."""

    texts: list[str]
    token_ids: list[list[int]]
    is_batch: bool

    def __len__(self) -> int:
        return len(self.texts) or len(self.token_ids)

    def param(self, index: int) -> str:
        """The name of the prompt at `index` in errors."""
        return f"prompt.{index}" if self.is_batch else "prompt"


@extend_schema_field(
    {
        "oneOf": [
            TEXT_SCHEMA,
            {"type": "array", "items": TEXT_SCHEMA, "minItems": 1},
            TOKEN_IDS_SCHEMA,
            {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1},
        ]
    }
)
class PromptField(StrictField):
    """A text, texts, the token ids of one prompt, or those of several."""

    def check(self, value: Any) -> GivenPrompts:
        """The prompts; texts without NUL or lone surrogates, ids as integers from 0."""
        if type(value) is str:
            if not value:
                raise FieldFault("must not be empty.")
            return GivenPrompts([check_text(value)], [], is_batch=False)
        if type(value) is not list:
            raise FieldFault("must be a string, a list of strings, a list of token ids or a list of such lists.")
        if not value:
            raise FieldFault("must not be empty.")
        kind = type(value[0])
        if kind is int:
            return GivenPrompts([], [TOKEN_ID_LIST.check(value)], is_batch=False)
        if kind is not str and kind is not list:
            raise FieldFault("must be a string, a token id or a list of token ids.", param="0")
        if len(value) > settings.WORK_BOUND_TOKENS:
            raise FieldFault(
                f"has {len(value):,} prompts; at most {settings.WORK_BOUND_TOKENS:,} tokens are generated."
            )
        if not (_are_texts(value) if kind is str else _are_token_id_lists(value)):
            for index, item in enumerate(value):
                try:
                    self._check_item(item, kind)
                except ApiError as error:
                    raise within(index, error) from None
        return GivenPrompts(value if kind is str else [], value if kind is list else [], is_batch=True)

    def _check_item(self, item: Any, kind: type[Any]) -> None:
        if type(item) is not kind:
            raise FieldFault("is of another type than the first prompt: texts and token ids can't be mixed.")
        if not item:
            raise FieldFault("must not be empty.")
        if kind is str:
            check_text(item)
        else:
            TOKEN_ID_LIST.check(item)


def _are_texts(values: list[Any]) -> bool:
    """Whether all are texts that PromptField takes, found out in C for thousands of prompts."""
    if set(map(type, values)) != {str} or not all(values):
        return False
    try:
        check_text("".join(values))
    except FieldFault:
        return False
    return True


def _are_token_id_lists(values: list[Any]) -> bool:
    """Whether all are lists of token ids that PromptField takes, found out in C for thousands of prompts."""
    if set(map(type, values)) != {list} or not all(values):
        return False
    return are_integers_within(list(chain.from_iterable(values)), 0, INT64_MAX)


@extend_schema_field(
    {
        "oneOf": [
            TEXT_SCHEMA,
            {"type": "array", "items": TEXT_SCHEMA, "minItems": 1, "maxItems": 4},
        ]
    }
)
class StopField(StrictField):
    """One stop string, or 1 to 4."""

    def check(self, value: Any) -> tuple[str, ...]:
        """The stop strings, none empty."""
        if type(value) is str:
            return (STOP_STRING.check(value),)
        if type(value) is not list:
            raise FieldFault("must be a string or a list of strings.")
        return tuple(STOP_STRINGS.check(value))


@extend_schema_field(
    {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "maxProperties": 300,
    }
)
class LogitBiasField(StrictField):
    """A map of token ids, written as JSON's keys are, to what is added to their logits."""

    def check(self, value: Any) -> dict[int, float]:
        """The biases by token id."""
        if type(value) is not dict:
            raise FieldFault("must be an object of token ids and numbers.")
        if len(value) > 300:
            raise FieldFault("must have at most 300 token ids.")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not LOGIT_BIAS_KEY.fullmatch(key):
                raise FieldFault("is not a token id.", param=printable(key))
            try:
                biases[int(key)] = LOGIT_BIAS.check(bias)
            except ApiError as error:
                raise within(key, error) from None
        return biases


@extend_schema_field(
    {
        "oneOf": [
            {"type": "boolean"},
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": INT64_MAX},
                "minItems": 1,
                "maxItems": 256,
                "uniqueItems": True,
            },
        ]
    }
)
class LayersField(StrictField):
    """`true` for every layer, or a list of distinct layers; `false` is the same as absent."""

    def check(self, value: Any) -> bool | list[int]:
        """The bool, or the layers as given."""
        if type(value) is bool:
            return value
        if type(value) is not list:
            raise FieldFault("must be true, false or a list of layers.")
        layers: list[int] = LAYERS.check(value)
        return layers


@extend_schema_field({"type": "integer", "minimum": -1, "maximum": INT64_MAX, "not": {"const": 0}})
class TopKField(StrictIntegerField):
    """-1, or 1 and up."""

    def check(self, value: Any) -> int:
        """An integer, not 0."""
        if super().check(value) == 0:
            raise FieldFault("must be -1, or 1 and up.")
        return int(value)


class StreamOptionsSerializer(StrictSerializer):
    """What a stream adds."""

    include_usage = StrictBooleanField(default=False, help_text="A last chunk with the usage.")


class CompletionRequestSerializer(StrictSerializer):
    """The body of `POST /v1/completions`: OpenAI's fields, vLLM's, and the residual stream's."""

    model = StrictCharField(min_length=1, help_text="An id of GET /v1/models.")
    prompt = PromptField(help_text="A text, texts, token ids, or lists of token ids; none empty.")
    max_tokens = StrictIntegerField(
        min_value=0,
        max_value=MAX_TOKENS,
        required=False,
        help_text="Tokens to generate for each prompt and n. 0 only with echo. Left out, with one prompt and n 1: "
        "what fits the context, at most 32,000. prompts * n * max_tokens is at most 32,000.",
    )
    n = StrictIntegerField(min_value=1, max_value=16, default=1, help_text="Texts for each prompt.")
    best_of = StrictIntegerField(required=False, help_text="null or equal to n.")
    temperature = StrictFloatField(min_value=0, max_value=100, default=1.0, help_text="0 is greedy.")
    top_p = StrictFloatField(
        above=0, max_value=1, default=1.0, help_text="Sample from the likeliest tokens of this probability in all."
    )
    top_k = TopKField(
        min_value=-1, default=-1, help_text="Sample from so many of the likeliest: 1 and up, or -1 for all."
    )
    min_p = StrictFloatField(
        min_value=0,
        max_value=1,
        default=0.0,
        help_text="Drop tokens below this share of the likeliest one's probability.",
    )
    presence_penalty = StrictFloatField(
        min_value=-2, max_value=2, default=0.0, help_text="Against tokens that were generated before."
    )
    frequency_penalty = StrictFloatField(
        min_value=-2, max_value=2, default=0.0, help_text="The same, for each time that they were."
    )
    repetition_penalty = StrictFloatField(
        above=0, max_value=2, default=1.0, help_text="Over 1 against repeating the prompt and the text, under 1 for it."
    )
    seed = StrictIntegerField(
        min_value=0, max_value=INT64_MAX, required=False, help_text="The same seed and request give the same text."
    )
    stop = StopField(required=False, help_text="One stop string, or 1 to 4: the text ends before it.")
    logprobs = StrictIntegerField(
        min_value=0,
        max_value=MAX_LOGPROBS,
        required=False,
        help_text="Logprobs of each token and so many alternatives.",
    )
    prompt_logprobs = StrictIntegerField(
        min_value=-1, max_value=MAX_LOGPROBS, required=False, help_text="-1: the whole vocabulary. Not with stream."
    )
    echo = StrictBooleanField(
        default=False, help_text="Put the prompt before its completion; with logprobs its tokens have theirs too."
    )
    stream = StrictBooleanField(default=False, help_text="Answer as server-sent events, as the tokens come.")
    stream_options = StreamOptionsSerializer(required=False, help_text="Only with stream.")
    add_special_tokens = StrictBooleanField(default=True, help_text="Let the tokenizer add the start token to text.")
    user = StrictCharField(max_length=256, required=False, help_text="Kept with the request.")
    logit_bias = LogitBiasField(required=False, help_text="What to add to the logits of up to 300 token ids.")
    min_tokens = StrictIntegerField(min_value=0, max_value=MAX_TOKENS, default=0, help_text="At most max_tokens.")
    ignore_eos = StrictBooleanField(default=False, help_text="Go on after the end token.")
    stop_token_ids = StrictListField(
        child=TOKEN_ID, max_length=16, required=False, help_text="Token ids that end the text."
    )
    include_stop_str_in_output = StrictBooleanField(default=False, help_text="Keep the stop string in the text.")
    skip_special_tokens = StrictBooleanField(default=True, help_text="Leave special tokens out of the text.")
    allowed_token_ids = StrictListField(
        child=TOKEN_ID, min_length=1, max_length=1024, required=False, help_text="Sample only from these."
    )
    logprob_token_ids = StrictListField(
        child=TOKEN_ID,
        min_length=1,
        max_length=128,
        required=False,
        help_text="Their logprobs are added at each generated position. Needs logprobs.",
    )
    return_token_ids = StrictBooleanField(
        default=False, help_text="Give prompt_token_ids and token_ids in each choice."
    )
    output_residual_stream = LayersField(
        required=False,
        help_text="true for every layer, or 1 to 256 distinct layers. One prompt, n 1, no stream. Layer k is the "
        "residual stream after decoder block k; the last layer is before the final norm.",
    )
    apply_steering_vectors = StrictListField(
        child=SteeringVectorSerializer(),
        min_length=1,
        max_length=8,
        required=False,
        help_text="Added to the residual stream, in their order. One prompt, n 1.",
    )

    @classmethod
    def check_object(cls, checked: dict[str, Any]) -> dict[str, Any]:
        """The rules between fields that need no model."""
        _check_amounts(checked)
        if checked.get("logprob_token_ids") and checked.get("logprobs") is None:
            raise FieldFault("needs logprobs.", param="logprob_token_ids")
        _check_companions(checked)
        return checked


def _check_amounts(checked: dict[str, Any]) -> None:
    n, n_prompts, max_tokens = checked["n"], len(checked["prompt"]), checked.get("max_tokens")
    if checked.get("best_of") not in (None, n):
        raise FieldFault(f"must be null or equal to n ({n}): vLLM dropped best_of.", param="best_of")
    if max_tokens is None:
        if n_prompts > 1 or n > 1:
            raise FieldFault("is required with several prompts or n over 1.", param="max_tokens")
        return
    if max_tokens == 0 and not checked["echo"]:
        raise FieldFault("may be 0 only with echo.", param="max_tokens")
    if checked["min_tokens"] > max_tokens:
        raise FieldFault(f"must be at most max_tokens ({max_tokens:,}).", param="min_tokens")
    # Scoring a prompt (max_tokens 0) costs the engine a token too.
    work, bound = n_prompts * n * max(1, max_tokens), settings.WORK_BOUND_TOKENS
    if work > bound:
        raise FieldFault(
            f"({max_tokens:,}) times {n_prompts:,} prompts times n {n} is {work:,}; at most {bound:,} is taken.",
            param="max_tokens",
        )


def _check_companions(checked: dict[str, Any]) -> None:
    stream, is_single = checked["stream"], len(checked["prompt"]) == 1 and checked["n"] == 1
    if checked.get("stream_options") is not None and not stream:
        raise FieldFault("needs stream.", param="stream_options")
    if checked.get("prompt_logprobs") is not None and stream:
        raise FieldFault("can't be streamed.", param="prompt_logprobs")
    if checked.get("output_residual_stream", False) is not False:
        if stream:
            raise FieldFault("can't be streamed.", param="output_residual_stream")
        if not is_single:
            raise FieldFault("takes one prompt and n 1.", param="output_residual_stream")
    if checked.get("apply_steering_vectors") and not is_single:
        raise FieldFault("takes one prompt and n 1.", param="apply_steering_vectors")


class CapabilitiesSerializer(serializers.Serializer[dict[str, Any]]):
    """What requests for a model may ask for; lengths in tokens."""

    max_model_len = serializers.IntegerField(help_text="The context: prompt and generated tokens.")
    n_layers = serializers.IntegerField(help_text="Layers are 0 to n_layers - 1.")
    hidden_size = serializers.IntegerField(help_text="The width of the residual stream.")
    max_logprobs = serializers.IntegerField(help_text="The most that logprobs may be.")
    activations = serializers.BooleanField(help_text="Whether it takes output_residual_stream.")
    steering = serializers.BooleanField(help_text="Whether it takes apply_steering_vectors.")
    harvest = serializers.BooleanField(help_text="Whether it takes Harvest jobs.")
    max_activation_prompt_tokens = serializers.IntegerField(
        help_text="The longest prompt with every layer asked for; with fewer layers more, in proportion."
    )
    full_vocab_max_prompt_tokens = serializers.IntegerField(
        help_text="Prompt tokens (times n) that prompt_logprobs -1 takes."
    )


class ModelSerializer(serializers.Serializer[dict[str, Any]]):
    """A Base model."""

    id = serializers.CharField(help_text="What requests call it.")
    object = serializers.ChoiceField(choices=["model"])
    created = serializers.IntegerField(help_text="Unix seconds.")
    owned_by = serializers.CharField(help_text="Always acsinfra.")
    served_model_name = serializers.CharField(help_text="The checkpoint.")
    status = serializers.ChoiceField(
        choices=["live", "starting", "unavailable"], help_text="Whether Inference is there for it."
    )
    capabilities = CapabilitiesSerializer()


class ModelListSerializer(serializers.Serializer[dict[str, Any]]):
    """The Base models."""

    object = serializers.ChoiceField(choices=["list"])
    data = ModelSerializer(many=True)  # type: ignore[assignment]


TOKEN_ID_LIST: Final = StrictListField(child=TOKEN_ID, min_length=1)
STOP_STRING: Final = StrictCharField(min_length=1)
STOP_STRINGS: Final = StrictListField(child=STOP_STRING, min_length=1, max_length=4)
LOGIT_BIAS: Final = StrictFloatField(min_value=-100, max_value=100)
LAYERS: Final = StrictListField(child=StrictIntegerField(min_value=0), min_length=1, max_length=256, distinct=True)
