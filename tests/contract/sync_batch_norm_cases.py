"""What the tests of SyncBatchNorm share: a batch that all ranks know, and a comparison with BatchNorm on it."""

from __future__ import annotations

from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.torch.sync_batch_norm import SyncBatchNorm

KINDS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
SPACE = {2: (), 3: (5,), 4: (4, 3), 5: (2, 3, 2)}
CHANNELS = 6
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def joined_batch(counts: list[int], dimensions: int, seed: int, mean: float = 0.0) -> torch.Tensor:
    """Return a batch, the same on every rank: float64, with channels of different mean and scale."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(counts), CHANNELS, *SPACE[dimensions])
    along = torch.arange(1, CHANNELS + 1, dtype=torch.float64).view(-1, *[1] * (dimensions - 2))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * along + along + mean


def mine(batch: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return this rank's part of it."""
    return torch.split(batch, counts)[hvd.rank()]


def pair(dimensions: int, **arguments: Any) -> tuple[Any, Any]:
    """Return our module and torch's, with the same parameters, float64."""
    torch.manual_seed(0)
    theirs = KINDS[dimensions](CHANNELS, **arguments).double()
    if theirs.affine:
        torch.nn.init.normal_(theirs.weight)
        torch.nn.init.normal_(theirs.bias)
    ours = SyncBatchNorm(CHANNELS, **arguments).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def compare(
    ours: Any, theirs: Any, counts: list[int], dimensions: int, memory_format: Any = torch.contiguous_format
) -> None:
    """Compare outputs, gradients and statistics of three training steps, then eval mode."""
    for seed in range(3):
        whole = joined_batch(counts, dimensions, seed).requires_grad_()
        weights = joined_batch(counts, dimensions, seed + 100)
        part = mine(whole, counts).detach().to(memory_format=memory_format).requires_grad_()
        expected, output = theirs(whole), ours(part)
        assert output.is_contiguous(memory_format=memory_format)
        torch.testing.assert_close(output, mine(expected, counts), **EXACT)
        for module in (ours, theirs):
            module.zero_grad()
        (expected * weights).sum().backward()
        (output * mine(weights, counts)).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, mine(whole.grad, counts), **EXACT)
        for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert our.grad is not None
            torch.testing.assert_close(hvd.allreduce(our.grad, op=hvd.Sum), their.grad, **EXACT)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for our, their in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(our, their, **EXACT)
    part = mine(joined_batch(counts, dimensions, 7), counts)
    torch.testing.assert_close(ours.eval()(part), theirs.eval()(part), **EXACT)


def uneven() -> list[list[int]]:
    """Rows of each rank: equal, different, none on some, one value on some."""
    size = hvd.size()
    return [[4] * size, [2 + 3 * rank for rank in range(size)], [5, *[0] * (size - 1)], [*[1] * (size - 1), 2]]
