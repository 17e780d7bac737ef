"""The answers of `POST /v1/completions` as the OpenAPI document describes them; `inference.answers` makes them."""

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

WHEN_ASKED = "Only with return_token_ids, else null."


class LogprobsSerializer(serializers.Serializer[Any]):
    """Four lists of one entry a token; with `echo` the prompt's tokens come first."""

    text_offset = serializers.ListField(
        child=serializers.IntegerField(), help_text="Where each token begins in the text, in characters."
    )
    token_logprobs = serializers.ListField(
        child=serializers.FloatField(allow_null=True), help_text="null for the first token of a prompt."
    )
    tokens = serializers.ListField(child=serializers.CharField(trim_whitespace=False), help_text="As text.")
    top_logprobs = serializers.ListField(
        child=serializers.DictField(child=serializers.FloatField(), allow_null=True),
        help_text="By text: the token that stands there and `logprobs` more. Candidates of the same text share an "
        "entry. null for the first token of a prompt.",
    )


class PromptLogprobSerializer(serializers.Serializer[Any]):
    """One candidate at one position of a prompt."""

    logprob = serializers.FloatField(help_text="-9999 stands for minus infinity.")
    rank = serializers.IntegerField(min_value=1, help_text="1 is the likeliest.")
    decoded_token = serializers.CharField(help_text="Its text.")


class PromptLogprobsField(serializers.ListField):
    """For each token of the prompt, candidates by their token id; null at position 0."""

    def __init__(self, **options: Any) -> None:
        child = serializers.DictField(child=PromptLogprobSerializer(), allow_null=True)
        super().__init__(child=child, **options)


@extend_schema_field({"type": ["integer", "string", "null"]})
class StopReasonField(serializers.Field):  # type: ignore[type-arg]
    """The stop string or token id that ended it."""


class ChunkChoiceSerializer(serializers.Serializer[Any]):
    """What one choice gained in a chunk of a stream."""

    index = serializers.IntegerField(min_value=0, help_text="By prompt, then by n.")
    text = serializers.CharField(trim_whitespace=False, help_text="What was generated; with echo after the prompt.")
    logprobs = LogprobsSerializer(allow_null=True, help_text="Only with the request's logprobs.")
    finish_reason = serializers.ChoiceField(
        choices=["stop", "length"], allow_null=True, help_text="null until the choice ends."
    )
    stop_reason = StopReasonField(help_text="The stop string or token id that ended it; null for any other end.")
    token_ids = serializers.ListField(
        child=serializers.IntegerField(), allow_null=True, help_text=f"Generated ids. {WHEN_ASKED}"
    )
    prompt_token_ids = serializers.ListField(
        child=serializers.IntegerField(), allow_null=True, help_text=f"The prompt's ids. {WHEN_ASKED}"
    )


class ChoiceSerializer(ChunkChoiceSerializer):
    """One of the prompts * n texts."""

    finish_reason = serializers.ChoiceField(
        choices=["stop", "length"], help_text="length: max_tokens; stop: a stop string, a stop token or the end token."
    )
    prompt_logprobs = PromptLogprobsField(allow_null=True, help_text="Only with the request's prompt_logprobs.")


class UsageSerializer(serializers.Serializer[Any]):
    """Tokens as the engine counted them, which is what is charged. A prompt counts once, however large n is."""

    prompt_tokens = serializers.IntegerField(min_value=0, help_text="Of all prompts.")
    total_tokens = serializers.IntegerField(min_value=0, help_text="The sum of the other two.")
    completion_tokens = serializers.IntegerField(min_value=0, help_text="Generated, of all choices.")


class CapturedTensorSerializer(serializers.Serializer[Any]):
    """A captured tensor: base64 of zstd of its little-endian bytes in C order."""

    data = serializers.CharField(help_text="Base64 of the compressed bytes.")  # type: ignore[assignment]
    dtype = serializers.ChoiceField(
        choices=["int16", "float16", "float32"], help_text="int16 holds the bits of bfloat16."
    )
    original_dtype = serializers.ChoiceField(
        choices=["torch.bfloat16", "torch.float16", "torch.float32"], help_text="The dtype that the model runs in."
    )
    shape = serializers.ListField(
        child=serializers.IntegerField(min_value=1),
        min_length=3,
        max_length=3,
        help_text="[layers, tokens, hidden]: layers ascend; tokens are the prompt's and the generated ones less the "
        "last, which never went through the model.",
    )
    compression = serializers.ChoiceField(choices=["zstd"], help_text="What the bytes are compressed with.")


class ActivationsSerializer(serializers.Serializer[Any]):
    """What was read inside the model."""

    residual_stream = CapturedTensorSerializer()


class CompletionSerializer(serializers.Serializer[Any]):
    """A Completion: OpenAI's `text_completion` as vLLM shapes it."""

    id = serializers.CharField(help_text="The request's.")
    object = serializers.ChoiceField(choices=["text_completion"])
    created = serializers.IntegerField(help_text="Unix seconds.")
    model = serializers.CharField(help_text="The checkpoint's name.")
    choices = ChoiceSerializer(many=True, help_text="By prompt, then by n.")
    service_tier = serializers.CharField(allow_null=True, help_text="Always null.")
    system_fingerprint = serializers.CharField(allow_null=True, help_text="Always null.")
    usage = UsageSerializer()
    activations = ActivationsSerializer(required=False, help_text="Only with the request's output_residual_stream.")


class CompletionChunkSerializer(serializers.Serializer[Any]):
    """One `data:` frame of a stream."""

    id = serializers.CharField(help_text="The request's.")
    object = serializers.ChoiceField(choices=["text_completion"])
    created = serializers.IntegerField(help_text="Unix seconds.")
    model = serializers.CharField(help_text="The checkpoint's name.")
    choices = ChunkChoiceSerializer(many=True, help_text="Empty in the chunk with the usage.")
    usage = UsageSerializer(required=False, help_text="In the last chunk, when stream_options asked for it.")
