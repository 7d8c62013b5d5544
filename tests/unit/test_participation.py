"""What the sum of all ranks' notes means, in the dtypes of buckets."""

from __future__ import annotations

import random

import pytest
import torch

from spark_hvd.torch.optimizer.participation import (
    EVERYONE,
    Participation,
    Presence,
    correction_on_device,
    notes_numel,
    write,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 256, 257, 700])
def test_sums_tell_what_the_ranks_told(size: int, dtype: torch.dtype) -> None:
    chance = random.Random(size)
    kinds = [[each] for each in Presence] + [[Presence.HERE, Presence.GONE], list(Presence)]
    for choice in kinds:
        presences = [chance.choice(choice) for _ in range(size)]
        total = torch.zeros(notes_numel(size), dtype=dtype)
        for rank, presence in enumerate(presences):
            notes = torch.full_like(total, 7.0)  # left by the step before
            write(notes, presence, rank)
            total += notes
        participation = Participation.read(total)
        assert participation == Participation.of(presences)
        assert float(correction_on_device(total, size)) == pytest.approx(participation.correction(size), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_averages_tell_what_the_ranks_told(dtype: torch.dtype) -> None:
    """NCCL multiplies by 1 / size in the bucket's dtype, or in float32; the tail is sent times size."""
    for size in (3, 33, 65, 257, 700):
        share = torch.tensor(1 / size, dtype=dtype)
        for factor in (share, 1 / size):
            notes, total = torch.zeros(notes_numel(size), dtype=dtype), torch.zeros(notes_numel(size), dtype=dtype)
            for rank in range(size - 1):  # all but one are gone
                write(notes, Presence.GONE, rank, float(size))
                total += (notes * factor).to(dtype)
            write(notes, Presence.HERE, size - 1, float(size))
            total += (notes * factor).to(dtype)
            assert Participation.read(total) == Participation(joined=True, gone=size - 1), size
            assert float(correction_on_device(total, size)) == size, size


def test_usual_step() -> None:
    assert Participation.of([Presence.HERE] * 3) == EVERYONE
    assert EVERYONE.correction(3) == 1.0
    assert Participation.of([Presence.HERE, Presence.GONE, Presence.JOINED]).correction(3) == 1.5
    assert Participation.of([Presence.GONE] * 3).correction(3) == 1.0  # for a step that no rank makes
