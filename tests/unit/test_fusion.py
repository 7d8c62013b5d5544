"""Batches of tensors to fuse: complete, bounded, one dtype each."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.fusion import batches, flatten, unflatten_into

DTYPES = [torch.float32, torch.float16, torch.int64]


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=30), st.integers(1, 200))
def test_laws(kinds: list[tuple[int, torch.dtype]], limit: int) -> None:
    tensors = [torch.zeros(count, dtype=dtype) for count, dtype in kinds]
    found = batches(tensors, limit)
    assert sorted(index for members in found for index in members) == list(range(len(tensors)))
    for members in found:
        assert len({tensors[index].dtype for index in members}) == 1
        assert len(members) == 1 or sum(tensors[i].numel() * tensors[i].element_size() for i in members) <= limit


def test_round_trip_through_strides() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(2, 2).t(), torch.tensor(7.0), torch.empty(0, 2)]
    flat = flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 2, 1, 3, 7]
    unflatten_into(flat + 1, tensors)
    assert tensors[1].tolist() == [[1, 3], [2, 4]]
    assert tensors[2].item() == 8
