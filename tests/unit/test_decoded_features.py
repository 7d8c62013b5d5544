"""Columns of bytes in ``transform``: what their decoder returns, and the messages about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.feeds import feature

SPEC = TensorSpec(Column("image", "object", (2,)))


def floats(value: bytes) -> Any:
    return np.frombuffer(value, np.uint8).astype("float32") / 2


def test_rows_have_the_shape_and_dtype_of_the_decoder() -> None:
    made = feature(pa.array([b"\x02\x04", b"\x06\x01"]), SPEC, {"image": floats}, "transform")
    assert str(made.dtype) == "torch.float32"
    assert made.tolist() == [[1, 2], [3, 0.5]]
    assert feature(pa.array([], pa.binary()), SPEC, {"image": floats}, "transform").shape == (0, 2)


@pytest.mark.parametrize(
    ("values", "decoder", "text"),
    [
        ([b"ab", None], floats, r"column 'image' in transform has 1 null\(s\) in 2 rows: fill or drop them"),
        ([b"ab", b"a"], floats, r"column 'image' in transform has shape \(1,\) in row 1, but \(2,\) in row 0"),
        (
            [b"ab", b""],
            lambda value: value[0],
            "decoder of column 'image' failed on row 1 of transform, 0 bytes",
        ),
        ([b"ab"], lambda value: value.decode(), "column 'image' in transform has 'ab' in row 0: expected numbers"),
    ],
)
def test_what_a_decoder_cannot_be_used_for(values: list[Any], decoder: Callable[[bytes], Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        feature(pa.array(values, pa.binary()), SPEC, {"image": decoder}, "transform")
