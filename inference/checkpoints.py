"""What a checkpoint's own files tell: `config.json`, `tokenizer.json`, `tokenizer_config.json`. No weights needed."""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from django.conf import settings
from tokenizers import Tokenizer

ActivationDtype = Literal["bfloat16", "float16", "float32"]
Json = Mapping[str, Any]

# The names that architectures give to the same thing, as vLLM 0.32 knows them.
N_LAYERS_KEYS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_SIZE_KEYS: Final = ("hidden_size", "n_embd", "d_model", "n_embed")
CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Rope types whose config gives the context already scaled.
ROPE_TYPES_ALREADY_SCALED: Final = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn")
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MAX_TOKENIZER_BYTES: Final = 256 * 1024 * 1024


class CheckpointError(Exception):
    """The checkpoint's files are missing, broken or silent on what is needed; the message is for the operator."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What the API must know of a checkpoint. `tokenizer` is the bytes of `tokenizer.json`; lengths are in tokens.

    `dtype` is what the checkpoint runs in by itself; None where that is none that the capture knows.
    """

    n_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: ActivationDtype | None
    config: dict[str, Any]
    tokenizer: bytes


def read_checkpoint_facts(folder: Path) -> CheckpointFacts:
    """Read a checkpoint's facts from its folder, which needs no weights.

    The numbers of a model that also sees or hears stand in its `text_config`. Raises CheckpointError.
    """
    config = _read_json(folder / "config.json")
    text = _text_config(config)
    if config.get("is_encoder_decoder"):
        raise CheckpointError("This checkpoint is an encoder-decoder; only decoders have one residual stream.")
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    return CheckpointFacts(
        n_layers=_positive(text, N_LAYERS_KEYS, "the number of layers"),
        hidden_size=_positive(text, HIDDEN_SIZE_KEYS, "the hidden size"),
        vocab_size=_positive(text, ("vocab_size",), "the vocabulary's size"),
        context_length=_context_length(text),
        bos_token_id=_bos_token_id(folder, config, text, tokenizer),
        eos_token_ids=_token_ids(text.get("eos_token_id", config.get("eos_token_id"))),
        dtype=_dtype(folder, config, text),
        config=_finite(config),
        tokenizer=tokenizer,
    )


def checkpoint_folder(source: str, *, revision: str, on_progress: Callable[[str], None] | None = None) -> Path:
    """A folder that holds the config and tokenizer of `source`; the weights of a hub id are not fetched for it.

    The GGUF of a package is converted first, which needs torch. Raises CheckpointError.
    """
    if source and Path(source).is_dir():
        return Path(source)
    if source.startswith("package:"):
        from inference.engine.checkpoint import resolve_source

        resolved = resolve_source(
            source, cache_dir=settings.MODELS_CACHE, revision=revision or None, on_progress=on_progress
        )
        return Path(resolved)
    if not HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source!r} is no folder here, no hub id and no package:<name>==<version>.")
    return _fetch_from_hub(source, revision=revision)


def _fetch_from_hub(hub_id: str, *, revision: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    folder: Path | None = None
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        try:
            folder = Path(hf_hub_download(hub_id, name, revision=revision or None)).parent
        except LocalEntryNotFoundError as error:
            if name != "tokenizer_config.json":
                raise CheckpointError(f"{hub_id}: the hub can't be reached, and {name} is not cached here.") from error
        except EntryNotFoundError:
            continue  # read_checkpoint_facts says what is missing
        except (HfHubHTTPError, OSError) as error:
            raise CheckpointError(f"{hub_id}: the hub refused {name}: {error}") from error
    if folder is None:
        raise CheckpointError(f"{hub_id} has neither config.json nor tokenizer.json.")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"The checkpoint has no {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The checkpoint's {path.name} can't be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"The checkpoint's {path.name} is not an object.")
    return value


def _text_config(config: Json) -> Json:
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, dict):
            return nested
    return config


def _positive(config: Json, keys: tuple[str, ...], what: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise CheckpointError(f"The checkpoint's config.json does not tell {what} ({' or '.join(keys)}).")


def _context_length(config: Json) -> int:
    """The context, by the rules of vLLM 0.32: the smallest that is named, times a rope factor not yet in it."""
    if config.get("model_max_length"):
        length = _positive(config, ("model_max_length",), "the context")
    else:
        named = [value for key in CONTEXT_KEYS if type(value := config.get(key)) is int and value > 0]
        if not named:
            raise CheckpointError("The checkpoint's config.json does not tell the context length.")
        length = min(named)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "gemma3" in str(config.get("model_type")):
        return length
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = config.get("original_max_position_embeddings")
    if kind == "longrope" and isinstance(original, int) and original > 0:
        return original  # what vLLM serves unless told: longer contexts degrade the short ones
    factor = rope.get("factor")
    if kind in ROPE_TYPES_ALREADY_SCALED or not isinstance(factor, int | float) or not factor >= 1:
        return length
    return int(length * factor)


def _token_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _bos_token_id(folder: Path, config: Json, text: Json, tokenizer: bytes) -> int | None:
    """The config's; where it names none, the id of the token that `tokenizer_config.json` names."""
    for source in (text, config):
        if ids := _token_ids(source.get("bos_token_id")):
            return ids[0]
    if not (folder / "tokenizer_config.json").is_file():
        return None
    token = _read_json(folder / "tokenizer_config.json").get("bos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return Tokenizer.from_buffer(tokenizer).token_to_id(token) if isinstance(token, str) else None


def _read_tokenizer(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError("The checkpoint's tokenizer.json is larger than 256 MiB.")
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            "The checkpoint has no tokenizer.json; save its tokenizer as a fast one (transformers' save_pretrained)."
        ) from None
    except OSError as error:
        raise CheckpointError(f"The checkpoint's tokenizer.json can't be read: {error}.") from error
    try:
        Tokenizer.from_buffer(content)
    except Exception as error:
        raise CheckpointError(f"The checkpoint's tokenizer.json can't be read: {error}.") from error
    return content


def _dtype(folder: Path, config: Json, text: Json) -> ActivationDtype | None:
    """The config's, else the weights' own, else float32 (the rule of transformers)."""
    named = next(
        (value for source in (text, config) for key in ("dtype", "torch_dtype") if (value := source.get(key))), None
    )
    dtype = str(named).removeprefix("torch.") if named else _dtype_of_weights(folder)
    return cast("ActivationDtype", dtype) if dtype in ("bfloat16", "float16", "float32") else None


def _dtype_of_weights(folder: Path) -> str:
    """Of the first floating tensor in a safetensors header, as old configs name none."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= 100_000_000:
                continue
            try:
                header = json.loads(file.read(length))
            except ValueError:
                continue
        for name, tensor in header.items():
            if name != "__metadata__" and isinstance(tensor, dict) and tensor.get("dtype") in names:
                return names[tensor["dtype"]]
    return "float32"


def _finite(value: Any) -> Any:
    """The same JSON with infinities as text: PostgreSQL's JSON has none, some configs do."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
