"""What LocalSGD's compressors send, and what they say that they have not sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spark_hvd.torch as hvd

KINDS = [
    hvd.Int8Compressor(7),
    hvd.Int8Compressor(),
    hvd.Int4Compressor(7),
    hvd.Int4Compressor(),
    hvd.TopKCompressor(0.3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_sent_and_what_is_left_are_the_whole(kind: Any, dtype: torch.dtype) -> None:
    """On each of three ranks, for any number of values."""
    for count in (1, 6, 255, 256, 257, 5003):
        torch.manual_seed(count)
        given = [torch.randn(count, dtype=dtype) * 10.0**rank for rank in range(3)]
        left = [values.clone() for values in given]
        rows = [kind.encode(values) for values in left]
        assert {(row.dtype, row.shape) for row in rows} == {(torch.uint8, rows[0].shape)}
        assert len(rows[0]) % 4 == 0
        mean = torch.full((count,), torch.nan, dtype=dtype)
        kind.mean(torch.stack(rows), mean)
        near = 1e-5 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(mean + sum(left) / 3, sum(given) / 3, rtol=near, atol=near)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "levels", "bytes_each"), [(hvd.Int8Compressor(), 127, 1), (hvd.Int4Compressor(), 7, 0.5)]
)
def test_blocks_round_to_the_nearest_step(kind: Any, levels: int, bytes_each: float) -> None:
    values = torch.linspace(-3, 3, 512)
    left = values.clone()
    row = kind.encode(left)
    assert len(row) == 2 * 4 + 512 * bytes_each
    for block, its in zip(values.split(256), left.split(256), strict=True):
        assert float(its.abs().max()) <= float(block.abs().max()) / levels / 2 * 1.0001


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(kind: Any, bad: float) -> None:
    """Rounding does not hide it, and it reaches no block but its own, though two share bytes."""
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    values[100] = bad
    given, mean = values.clone(), torch.empty_like(values)
    kind.mean(kind.encode(values)[None], mean)
    assert not mean[100].isfinite()
    torch.testing.assert_close((mean + values)[256:], given[256:])


@pytest.mark.parametrize(("kind", "bytes_each"), [(hvd.Int8Compressor, 1), (hvd.Int4Compressor, 0.5)])
@pytest.mark.parametrize("block_size", [256, 1000, 2**18, 1_000_000])
def test_rows_hardly_grow_by_padding(kind: Any, bytes_each: float, block_size: int) -> None:
    for count in (10, 600, 5003, 2**18, 1_100_000):
        compression = kind(block_size)
        blocks = count / block_size + 2
        assert len(compression.encode(torch.ones(count))) <= bytes_each * count + 4 * blocks + blocks + 4
        assert compression.unit() == block_size / bytes_each


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zeros_are_sent_as_zeros(kind: Any) -> None:
    values, mean = torch.zeros(300), torch.ones(300)
    kind.mean(kind.encode(values)[None], mean)
    assert not mean.any()
    assert not values.any()
