"""The allow-list of vLLM engine arguments."""

import ast
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from inference.engine_args import ALLOWED, REFUSED, check_engine_args, parse_engine_arg


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"enforce_eager": True, "enable_prefix_caching": False},
        {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 8192},
        {"gpu_memory_utilization": 1},
        {"quantization": "fp8", "distributed_executor_backend": "ray", "block_size": 32},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    ],
)
def test_listed_arguments_in_their_ranges_are_taken(args: dict[str, Any]) -> None:
    assert check_engine_args(args, context_length=512) == args


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enforce_eager", 1),
        ("enforce_eager", "true"),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", math.nan),
        ("gpu_memory_utilization", True),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 1.0),
        ("max_num_batched_tokens", 10**30),
        ("quantization", "my.module"),
        ("distributed_executor_backend", "my.module.Executor"),
        ("optimization_level", 4),
        ("seed", None),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_right(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        check_engine_args({name: value})
    assert caught.value.messages == [f"The engine argument {name} must be {ALLOWED[name].describe()}, not {value!r}."]


@pytest.mark.parametrize("name", [*REFUSED, "no_such_argument", ""])
def test_what_is_not_listed_is_refused_with_its_reason(name: str) -> None:
    assert name not in ALLOWED
    for refused in (lambda: check_engine_args({name: True}), lambda: parse_engine_arg(f"{name}=true")):
        with pytest.raises(ValidationError) as caught:
            refused()
        (message,) = caught.value.messages
        assert name in message
        assert REFUSED.get(name, "allowed are") in message


@pytest.mark.parametrize("args", [[], None, "a", 1])
def test_arguments_are_an_object(args: Any) -> None:
    with pytest.raises(ValidationError):
        check_engine_args(args)


def test_every_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        check_engine_args({"block_size": 0, "worker_cls": "a.B", "enforce_eager": True})
    assert len(caught.value.messages) == 2


def test_without_chunked_prefill_a_step_holds_the_context() -> None:
    with pytest.raises(ValidationError, match="must hold the context"):
        check_engine_args({"enable_chunked_prefill": False, "max_num_batched_tokens": 511}, context_length=512)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("enforce_eager=true", ("enforce_eager", True)),
        ("enforce_eager=False", ("enforce_eager", False)),
        ("block_size=32", ("block_size", 32)),
        ("gpu_memory_utilization=0.5", ("gpu_memory_utilization", 0.5)),
        ("quantization=fp8", ("quantization", "fp8")),
    ],
)
def test_a_command_line_argument_is_read_by_its_type(text: str, parsed: tuple[str, Any]) -> None:
    assert parse_engine_arg(text) == parsed
    assert type(parse_engine_arg(text)[1]) is type(parsed[1])


@pytest.mark.parametrize("text", ["enforce_eager", "enforce_eager=1", "block_size=1.5", "gpu_memory_utilization=nan"])
def test_a_command_line_argument_of_another_type_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        parse_engine_arg(text)


def test_every_listed_argument_is_one_of_vllms() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    # Read, not imported: that takes many seconds and changes transformers for the tests that follow.
    module = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text())
    (arguments,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    names = {
        field.target.id
        for field in arguments.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert ALLOWED.keys() <= names
    assert REFUSED.keys() <= names
