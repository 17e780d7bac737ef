"""Decoding tensors: what goes in comes out, and what is wrong is refused within bounded memory."""

import base64
import io
import math
import resource
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from acsinfra.core.fields import FieldFault
from inference.tensors import TensorSerializer, decode_tensor
from tests.inference.tensor_json import bfloat16_bits, tensor_json

MIB = 2**20


def decode(tensor: dict[str, Any]) -> Any:
    return decode_tensor(TensorSerializer.check(tensor))


def fault_of(tensor: dict[str, Any]) -> FieldFault:
    with pytest.raises(FieldFault) as caught:
        decode(tensor)
    return caught.value


def _param_of(tensor: dict[str, Any]) -> str | None:
    """Return the param of the refusal, None for a tensor that has just its shape's bytes."""
    try:
        decoded = decode(tensor)
    except FieldFault as fault:
        return fault.param
    assert len(decoded.data) == math.prod(tensor["shape"]) * {"float32": 4, "float16": 2}[tensor["dtype"]]
    return None


@given(
    st.sampled_from(["<f4", "<f2"]),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["zstd", "none", None]),
)
def test_floats_come_back_bit_for_bit(kind: str, shape: list[int], seed: int, compression: str | None) -> None:
    array = np.random.default_rng(seed).normal(size=shape).astype(kind)
    tensor = decode(tensor_json(array, compression=compression))
    assert tensor.data == array.tobytes()
    assert tensor.shape == tuple(shape)
    assert tensor.dtype == {"<f4": "float32", "<f2": "float16"}[kind]


def test_bfloat16_travels_as_int16() -> None:
    bits = bfloat16_bits(np.array([[1.0, -2.5, 3.4e38]]))
    tensor = decode(tensor_json(bits))
    assert (tensor.dtype, tensor.data) == ("bfloat16", bits.tobytes())


@given(st.binary(max_size=400), st.sampled_from(["zstd", "none"]))
def test_any_bytes_either_decode_or_name_data(raw: bytes, compression: str) -> None:
    tensor = {
        "data": base64.b64encode(raw).decode(),
        "dtype": "float32",
        "shape": [2, 4],
        "compression": compression,
    }
    assert _param_of(tensor) in (None, "data")


@given(st.text(max_size=60))
def test_any_text_as_base64_either_decodes_or_names_data(text: str) -> None:
    assert _param_of({"data": text, "dtype": "float16", "shape": [3]}) in (None, "data")


@pytest.mark.parametrize(
    "data", ["AAA", "AAAA=", "AAAA====", "AAA==", "A===", "AA==AA==", "AAAA\n", " AAAA", "AA-_", "AAAAA", "é"]
)
def test_base64_is_strict(data: str) -> None:
    fault = fault_of({"data": data, "dtype": "float16", "shape": [1]})
    message = f"is not base64: it has {len(data)} characters, and shape [1] of float16 takes 2."
    assert (fault.param, fault.message) == ("data", message)


@given(st.data())
def test_a_cut_zstd_frame_is_refused(data: st.DataObject) -> None:
    array = np.random.default_rng(5).normal(size=(8, 16)).astype("<f4")
    checksum = data.draw(st.booleans())
    frame = zstandard.ZstdCompressor(write_checksum=checksum).compress(array.tobytes())
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    fault = fault_of({**tensor_json(array), "data": base64.b64encode(cut).decode()})
    assert fault.param == "data"


def test_bytes_after_the_frame_and_second_frames_are_refused() -> None:
    array = np.ones((4, 4), "<f4")
    frame = zstandard.ZstdCompressor().compress(array.tobytes())
    half = zstandard.ZstdCompressor().compress(array.tobytes()[:32])
    for raw in (frame + b"x", frame + frame, half + half):
        assert fault_of({**tensor_json(array), "data": base64.b64encode(raw).decode()}).param == "data"


@pytest.mark.parametrize("names_its_size", [True, False])
def test_a_frame_that_expands_past_its_shape_is_refused_in_bounded_memory(names_its_size: bool) -> None:
    """A gigabyte of zeros in some 40 KB: neither Python's memory nor the process's grows by a fraction of it."""
    compressor = zstandard.ZstdCompressor(level=3)
    sink = io.BytesIO()
    with compressor.stream_writer(sink, size=1024 * MIB if names_its_size else -1, closefd=False) as writer:
        for _ in range(256):
            writer.write(bytes(4 * MIB))
    bomb = {"data": base64.b64encode(sink.getvalue()).decode(), "dtype": "float32", "shape": [4, 64]}
    resident_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    fault = fault_of({**bomb, "compression": "zstd"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fault.param == "data"
    assert peak < 8 * MIB
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident_before) * 1024 < 64 * MIB


def test_too_few_and_too_many_bytes_are_refused_with_both_numbers() -> None:
    array = np.ones((2, 4), "<f4")
    for compression in ("zstd", "none"):
        for shape in ([2, 3], [2, 5]):
            fault = fault_of({**tensor_json(array, compression=compression), "shape": shape})
            assert fault.param == "data"
            assert str(shape[0] * shape[1] * 4) in fault.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["<f4", "<f2", "bfloat16"])
def test_a_value_that_is_not_finite_is_refused(value: float, kind: str) -> None:
    array = np.ones((2, 4), "<f4")
    array[1, 2] = value
    coded = bfloat16_bits(array) if kind == "bfloat16" else array.astype(kind)
    assert fault_of(tensor_json(coded)).message.startswith("holds a value that is not finite, among its ")


def test_zero_vectors_are_found_along_the_last_axis() -> None:
    array = np.ones((2, 3, 4), "<f4")
    array[1, 2] = -0.0
    for coded in (array, array.astype("<f2"), bfloat16_bits(array)):
        assert decode(tensor_json(coded)).has_zero_vector()
        assert not decode(tensor_json(coded[:1])).has_zero_vector()


GOOD = tensor_json(np.ones((1, 2), "<f4"))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"data": None}, "data"),
        ({"data": 5}, "data"),
        ({"dtype": "int16"}, "original_dtype"),
        ({"dtype": "int16", "original_dtype": None}, "original_dtype"),
        ({"original_dtype": "torch.bfloat16"}, "original_dtype"),
        ({"original_dtype": "torch.float16"}, "original_dtype"),
        ({"original_dtype": "float32"}, "original_dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": "float64"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"shape": None}, "shape"),
        ({"shape": []}, "shape"),
        ({"shape": [1, 1, 1, 2]}, "shape"),
        ({"shape": [0, 2]}, "shape.0"),
        ({"shape": [1, -2]}, "shape.1"),
        ({"shape": [1, 2.0]}, "shape.1"),
        ({"shape": [True, 2]}, "shape.0"),
        ({"shape": [1, "2"]}, "shape.1"),
        ({"shape": "12"}, "shape"),
        ({"compression": "gzip"}, "compression"),
        ({"compression": ""}, "compression"),
        ({"more": 1}, "more"),
    ],
)
def test_each_key_of_a_tensor_is_checked(change: dict[str, Any], param: str) -> None:
    assert fault_of({**GOOD, **change}).param == param


def test_of_floats_original_dtype_may_be_left_out() -> None:
    assert decode({**GOOD, "original_dtype": None}).dtype == "float32"
