"""Tensors in JSON: `{"data": base64, "dtype", "original_dtype", "shape", "compression"}`, decoded within bounds."""

import binascii
import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import zstandard

from acsinfra.core.fields import (
    INT64_MAX,
    FieldFault,
    StrictCharField,
    StrictChoiceField,
    StrictIntegerField,
    StrictListField,
    StrictSerializer,
)

TensorDtype = Literal["bfloat16", "float16", "float32"]
ITEM_BYTES: Final[dict[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}
# bfloat16 travels as its bits in an int16. Each dtype goes with one original_dtype; of floats it may be left out.
ORIGINAL_DTYPES: Final[dict[str, str]] = {
    "int16": "torch.bfloat16",
    "float16": "torch.float16",
    "float32": "torch.float32",
}
AXES_AT_MOST: Final = 3
# What zstd's highest ordinary level needs; a frame that asks for more memory is refused.
MAX_ZSTD_WINDOW_BYTES: Final = 128 * 1024 * 1024
BFLOAT16_EXPONENT: Final = 0x7F80
BFLOAT16_MAGNITUDE: Final = 0x7FFF


class TensorSerializer(StrictSerializer):
    """A tensor as JSON: base64 of its little-endian bytes in C order, perhaps compressed with zstd."""

    data = StrictCharField(help_text="Base64 of the bytes.")  # type: ignore[assignment]
    dtype = StrictChoiceField(choices=list(ORIGINAL_DTYPES), help_text="int16 holds the bits of bfloat16.")
    original_dtype = StrictChoiceField(
        choices=list(ORIGINAL_DTYPES.values()), required=False, help_text="torch.bfloat16 with int16."
    )
    shape = StrictListField(
        child=StrictIntegerField(min_value=1),
        min_length=1,
        max_length=AXES_AT_MOST,
        help_text="The length of each axis.",
    )
    compression = StrictChoiceField(choices=["zstd", "none"], required=False, help_text="null is none.")

    @classmethod
    def check(cls, value: Any) -> dict[str, Any]:
        """`value` checked; a FieldFault names the bytes that came, and those that the shape takes where it is one."""
        try:
            return super().check(value)
        except FieldFault as fault:
            raise with_byte_counts(fault, value) from None

    @classmethod
    def check_object(cls, checked: dict[str, Any]) -> dict[str, Any]:
        """Hold `dtype` and `original_dtype` to each other."""
        wanted = ORIGINAL_DTYPES[checked["dtype"]]
        given = checked.get("original_dtype")
        if given != wanted and (given is not None or checked["dtype"] == "int16"):
            raise FieldFault(f"must be {wanted} with dtype {checked['dtype']}.", param="original_dtype")
        return checked


@dataclass(frozen=True)
class Tensor:
    """The bytes of a tensor, little-endian, C order, with its dtype and shape; every value is finite."""

    data: bytes
    dtype: TensorDtype
    shape: tuple[int, ...]

    def has_zero_vector(self) -> bool:
        """Whether a vector along the last axis is all zeros."""
        values = _as_array(self.data, self.dtype).reshape(self.shape)
        if self.dtype == "bfloat16":
            values = values & BFLOAT16_MAGNITUDE  # minus zero has a bit set
        return not values.any(axis=-1).all()


def tensor_bytes(fields: dict[str, Any]) -> int:
    """The size that a checked TensorSerializer claims, in bytes."""
    return int(math.prod(fields["shape"])) * ITEM_BYTES[_dtype(fields)]


def with_byte_counts(fault: FieldFault, tensor: Any) -> FieldFault:
    """`fault`, about a tensor object that may be wrong in any way, with the bytes that came and those it should have.

    Of what is compressed, the compressed bytes came.
    """
    data = tensor.get("data") if isinstance(tensor, dict) else None
    if type(data) is str and data:
        came = len(data) * 3 // 4 - min(2, len(data) - len(data.rstrip("=")))
        came_as = " of zstd" if tensor.get("compression") == "zstd" else ""
        fault.message = f"{fault.message.removesuffix('.')} (data has {came:,} bytes{came_as}{_takes(tensor)})."
    return fault


def decode_tensor(fields: dict[str, Any]) -> Tensor:
    """Decode the fields of a checked TensorSerializer.

    Never makes more than the claimed shape's bytes, so the caller bounds `tensor_bytes` first. Raises FieldFault with
    param `data`, naming the bytes there are and those of the shape, for bad base64 or zstd, a wrong number of bytes,
    or a value that is not finite.
    """
    size, dtype, text = tensor_bytes(fields), _dtype(fields), fields["data"]
    try:
        raw = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raw = None
    # Python 3.12's strict mode lets surplus padding pass.
    if raw is None or len(text) != 4 * -(-len(raw) // 3):
        raise FieldFault(f"is not base64: it has {len(text):,} characters{_takes(fields)}.", param="data")
    data = _decompress(raw, fields) if fields.get("compression") == "zstd" else raw
    if len(data) != size:
        raise FieldFault(f"has {len(data):,} bytes{_takes(fields)}.", param="data")
    if not _is_finite(_as_array(data, dtype)):
        raise FieldFault(f"holds a value that is not finite, among its {size:,} bytes.", param="data")
    return Tensor(data, dtype, tuple(fields["shape"]))


def _takes(tensor: dict[str, Any]) -> str:
    """The bytes that a tensor's shape takes, as the end of a sentence; "" where shape or dtype is none."""
    shape, dtype = tensor.get("shape"), tensor.get("dtype")
    if type(dtype) is not str or dtype not in ORIGINAL_DTYPES or type(shape) is not list or len(shape) > AXES_AT_MOST:
        return ""
    if not shape or not all(type(length) is int and 0 < length <= INT64_MAX for length in shape):
        return ""
    name = _dtype(tensor)
    return f", and shape {shape} of {name} takes {math.prod(shape) * ITEM_BYTES[name]:,}"


def _dtype(fields: dict[str, Any]) -> TensorDtype:
    dtype: TensorDtype = "bfloat16" if fields["dtype"] == "int16" else fields["dtype"]
    return dtype


def _decompress(raw: bytes, fields: dict[str, Any]) -> bytes:
    """The content of the one zstd frame in `raw`, which must have the shape's bytes; reads at most one byte more."""
    size = tensor_bytes(fields)
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(raw, read_across_frames=False) as reader:
            data = reader.read(size + 1)
        if len(data) > size:
            raise FieldFault(
                f"decompresses to more: its {len(raw):,} bytes of zstd hold over {size:,}{_takes(fields)}.",
                param="data",
            )
        # The reader takes a frame without its end for a whole one. Its content is known to be small by now.
        frame = decompressor.decompressobj()
        frame.decompress(raw)
    except (zstandard.ZstdError, MemoryError):
        raise FieldFault(f"is not zstd: it has {len(raw):,} bytes{_takes(fields)}.", param="data") from None
    if not frame.eof or frame.unused_data:
        message = f"is not one whole zstd frame: it has {len(raw):,} bytes{_takes(fields)}."
        raise FieldFault(message, param="data")
    return data


def _as_array(data: bytes, dtype: TensorDtype) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, {"bfloat16": "<i2", "float16": "<f2", "float32": "<f4"}[dtype])


def _is_finite(values: np.ndarray[Any, Any]) -> bool:
    if values.dtype == np.int16:
        return not ((values & BFLOAT16_EXPONENT) == BFLOAT16_EXPONENT).any()
    return bool(np.isfinite(values).all())
