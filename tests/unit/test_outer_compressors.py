"""What LocalSGD's compressors send and keep, and LocalSGD without other ranks: its states and fragments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.torch.outer.compressors import Averaging

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
    """Rounding does not hide it, and it affects only its own block, even if two share bytes."""
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


@pytest.mark.parametrize("kind", [hvd.LocalSGD, hvd.DiLoCo])
def test_a_state_is_loaded_by_name_whatever_the_fragments(kind: Any) -> None:
    """Even with parameters of equal shapes; a state without fragments has one."""

    def made(*divided: int) -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(torch.full((3,), float(number))) for number in range(3)]
        groups = [[params[place]] for place in divided] if divided else 1
        return params, kind(params, torch.optim.SGD(params, lr=1.0), 8, fragments=groups)

    for source in ((), (2, 0)):
        _, optimizer = made(*source)
        order = [*source, *(place for place in range(3) if place not in source)]
        state = optimizer.state_dict()
        outer = state["outer"]
        for flat, value in zip(outer["anchors"], ([order] if not source else [[each] for each in order]), strict=True):
            flat.copy_(torch.tensor(value).repeat_interleave(3))
        outer["steps"] = [3] * len(outer["steps"])
        if not source:
            outer["steps"] = 3
            del outer["waits"], outer["fragments"]
        for target in ((), (1, 2), (0, 2)):
            _, other = made(*target)
            other.load_state_dict(state)
            assert [float(anchor.detach()[0]) for anchor in other._loop.anchors] == [0, 1, 2]
            assert other.local_steps == 3
    for change in ({"fragments": [[0, 1]]}, {"steps": [1, 2, 3, 4]}, {"anchors": [torch.ones(4)]}):
        _, other = made()
        with pytest.raises(ValueError, match="load it into an optimizer of the same kind"):
            other.load_state_dict({**state, "outer": {**outer, **change}})
    del outer["lost"]
    with pytest.raises(ValueError, match="lacks 'lost'"):
        other.load_state_dict(state)


def test_small_parameters_are_encoded_together() -> None:
    """In pieces of whole blocks."""

    class Noting(hvd.Int8Compressor):
        def encode(self, values: torch.Tensor) -> torch.Tensor:
            seen.append(len(values))
            return super().encode(values)

    seen: list[int] = []
    values = torch.ones(600_000)
    averaging = Averaging(values, "", Noting(1000), process_set=hvd.global_process_set)
    for _ in range(600):
        averaging.written(1000)
    assert seen == [262_000, 262_000]


def test_fragments_ignore_parameters_that_are_not_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = hvd.LocalSGD(
        model, torch.optim.SGD(trained), 4, fragments=[list(layer.parameters()) for layer in model]
    )
    assert optimizer.state_dict()["outer"]["fragments"] == [[0], [1, 2]]
