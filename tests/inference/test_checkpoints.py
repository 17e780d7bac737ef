"""What is read from a checkpoint's config and tokenizer, whatever names its architecture gives things."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference.checkpoints import CheckpointError, CheckpointFacts, checkpoint_folder, read_checkpoint_facts
from tests.tiny_model import VOCAB_SIZE


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny checkpoint to spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "checkpoint"))


def _facts(folder: Path, config: Any) -> CheckpointFacts:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_checkpoint_facts(folder)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128_000,
    "eos_token_id": [128_001, 128_009],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "vocab_size": 50_257, "n_positions": 1024, "n_ctx": 1024}


def test_the_tiny_model(tiny_model: Path) -> None:
    facts = read_checkpoint_facts(tiny_model)
    assert (facts.n_layers, facts.hidden_size, facts.vocab_size, facts.context_length) == (4, 64, VOCAB_SIZE, 512)
    assert (facts.bos_token_id, facts.eos_token_ids, facts.dtype) == (0, (1,), "float32")
    assert facts.tokenizer == (tiny_model / "tokenizer.json").read_bytes()
    assert facts.config["model_type"] == "llama"


def test_a_llama(folder: Path) -> None:
    facts = _facts(folder, LLAMA)
    assert (facts.n_layers, facts.hidden_size, facts.vocab_size) == (32, 4096, 128_256)
    assert (facts.context_length, facts.dtype) == (131_072, "bfloat16")
    assert (facts.bos_token_id, facts.eos_token_ids) == (128_000, (128_001, 128_009))


def test_a_gpt2_takes_its_dtype_from_its_weights(folder: Path) -> None:
    facts = _facts(folder, GPT2)
    assert (facts.n_layers, facts.hidden_size, facts.context_length, facts.dtype) == (12, 768, 1024, "float32")


def test_a_start_token_that_the_config_leaves_out_is_in_the_tokenizers_config(folder: Path) -> None:
    assert _facts(folder, GPT2).bos_token_id == 0
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "</s>"}}))
    assert _facts(folder, GPT2).bos_token_id == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None}))
    assert _facts(folder, GPT2).bos_token_id is None
    (folder / "tokenizer_config.json").unlink()
    assert _facts(folder, GPT2).bos_token_id is None


def test_a_model_that_also_sees_keeps_its_numbers_in_text_config(folder: Path) -> None:
    facts = _facts(folder, {"model_type": "gemma3", "dtype": "bfloat16", "vision_config": {}, "text_config": LLAMA})
    assert (facts.n_layers, facts.hidden_size, facts.dtype) == (32, 4096, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_scaling": None}, 131_072),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 4096}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}, "max_position_embeddings": 1000}, 2500),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32_768}, 32_768),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": None}, 131_072),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"model_max_length": 8192, "rope_scaling": None}, 8192),
        ({"seq_length": 2048, "rope_scaling": None}, 2048),
    ],
)
def test_the_context_is_the_one_that_vllm_derives(folder: Path, changes: dict[str, Any], context: int) -> None:
    assert _facts(folder, LLAMA | changes).context_length == context


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "32", True, 4.0, []])
def test_a_config_that_does_not_tell_is_refused(folder: Path, name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match="does not tell"):
        _facts(folder, LLAMA | {name: value})


@pytest.mark.parametrize("config", ["", "{", "[]", "null", '"a"', "[" * 100_000])
def test_a_broken_config_is_refused(folder: Path, config: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        _facts(folder, config)


def test_an_infinity_in_a_config_becomes_text_that_postgresql_keeps(folder: Path) -> None:
    facts = _facts(folder, json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")]}))
    assert facts.config["time_step_limit"] == [0.0, "inf"]


def test_an_encoder_decoder_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="encoder-decoder"):
        _facts(folder, LLAMA | {"is_encoder_decoder": True})


def test_a_dtype_that_activations_do_not_come_in_is_none(folder: Path) -> None:
    assert _facts(folder, LLAMA | {"torch_dtype": "float8_e4m3fn"}).dtype is None
    assert _facts(folder, LLAMA | {"torch_dtype": "torch.float16"}).dtype == "float16"


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        read_checkpoint_facts(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        read_checkpoint_facts(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_checkpoint_facts(folder)


@pytest.mark.parametrize("source", ["/no/such/folder", "./nothing", "a/b/c", "package:", "", "a b", "http://x/y"])
def test_a_source_that_is_none_is_refused_in_a_sentence(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint_folder(source, revision="")
    assert str(caught.value).endswith(".")


def test_a_hub_id_that_is_not_cached_here_is_refused_while_offline() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is not cached here"):
        checkpoint_folder("nobody-here/no-model", revision="")


def test_reading_a_checkpoint_imports_no_torch(tiny_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from inference.checkpoints import read_checkpoint_facts;"
        "print(read_checkpoint_facts(Path(sys.argv[1])).n_layers, bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code, str(tiny_model)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["4", "False"]
