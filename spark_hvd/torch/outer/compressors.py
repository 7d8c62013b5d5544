"""The mean of a flat tensor over the ranks, and compressors whose results cannot be summed in transit.

With such a compressor, each rank gathers what all ranks have sent, and decodes it. A rank keeps what its compression
has
lost and adds it to what it sends next: error feedback, as in Seide et al., "1-Bit Stochastic Gradient Descent"
(Interspeech 2014).
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.execution import single_result
from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.collectives.start import Reducing, start_allgather, start_allreduce
from spark_hvd.transport.communicator import ReduceOp

_LEVELS = 127
_MOST = 2**31
"""Number of elements that an int32 can index."""


@runtime_checkable
class RowCompressor(Protocol):
    """Turns numbers into a row of bytes, of equal length on every rank, and back."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of some values.

        Args:
            values: One-dimensional, float32 or float64.

        Returns:
            One-dimensional, uint8. Its length is a multiple of four that depends only on the number of values.
        """

    def decode(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values of a row to `out`, which has the shape and dtype of the encoded values."""


class Int8Compressor:
    """Sends an int8 for each number and a float32 scale for each block: about a quarter of float32's bytes.

    Every rank receives the rows of all others, so with n ranks a link carries (n - 1) bytes per number. An all-reduce
    of float32 carries 8 (n - 1) / n, which is more below 8 ranks.

    Args:
        block_size: How many numbers share a scale. The scale is the largest absolute value divided by 127.

    Raises:
        ValueError: `block_size` is not a positive whole number.
    """

    __module__ = "spark_hvd.torch"

    def __init__(self, block_size: int = 256) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r}: expected a whole number of 1 or more, such as 256")
        self.block_size = block_size

    def __repr__(self) -> str:
        return f"Int8Compressor(block_size={self.block_size})"

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See RowCompressor."""
        blocks = pad(values.float(), (0, -len(values) % self.block_size)).view(-1, self.block_size)
        scales = blocks.abs().amax(1) / _LEVELS
        # A block of zeros can have any scale. A non-finite number makes its scale non-finite, and so all decoded
        # numbers.
        numbers = (blocks / torch.where(scales == 0, 1.0, scales)[:, None]).round_().to(torch.int8)
        # Rows are stored one after another, and the scales of each must begin at a multiple of four bytes.
        return torch.cat([scales.view(torch.uint8), pad(numbers.view(-1).view(torch.uint8), (0, -numbers.numel() % 4))])

    def decode(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """See RowCompressor."""
        count = -(-len(out) // self.block_size)
        scales = row[: 4 * count].view(torch.float32)
        numbers = row[4 * count :][: count * self.block_size].view(torch.int8).view(count, self.block_size)
        out += (numbers * scales[:, None]).view(-1)[: len(out)]


class TopKCompressor:
    """Sends only the numbers with the largest absolute values, as a float32 and an int32 each.

    With n ranks a link carries 8 (n - 1) ratio bytes for each number of the tensor.

    Args:
        ratio: The share of numbers that is sent: more than 0, up to 1.

    Raises:
        ValueError: `ratio` is not in that range.
    """

    __module__ = "spark_hvd.torch"

    def __init__(self, ratio: float = 0.01) -> None:
        if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: expected a share of all numbers, above 0 and up to 1, such as 0.01")
        self.ratio = ratio

    def __repr__(self) -> str:
        return f"TopKCompressor(ratio={self.ratio})"

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See RowCompressor.

        Raises:
            ValueError: There are more numbers than an int32 can count.
        """
        if len(values) > _MOST:
            raise ValueError(f"TopKCompressor: {len(values)} parameters are more than {_MOST}; use Int8Compressor")
        count = math.ceil(self.ratio * len(values))
        places = values.abs().topk(count, sorted=False).indices
        return torch.cat([values[places].float().view(torch.uint8), places.int().view(torch.uint8)])

    def decode(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """See RowCompressor."""
        half = len(row) // 2
        out.index_add_(0, row[half:].view(torch.int32), row[:half].view(torch.float32).to(out.dtype))


class Averaging:
    """The mean over the ranks of one flat tensor; the constructor starts it.

    ``values`` are one-dimensional and overwritten.

    Attributes:
        lost: What compression has lost of `values`; None if nobody needs to keep it.
    """

    lost: torch.Tensor | None = None

    def __init__(
        self, values: torch.Tensor, name: str, compression: Any = Compression.none, *, process_set: ProcessSet
    ) -> None:
        self._compression = compression
        self._values = values
        if isinstance(compression, RowCompressor):
            row = compression.encode(values)
            sent = torch.zeros_like(values)
            compression.decode(row, sent)
            self.lost = values.sub_(sent)
            self._handle = start_allgather([row[None]], name, process_set, single_result)
        else:
            wire, self._context = compression.compress(values)
            reducing = Reducing(ReduceOp.AVERAGE)
            self._handle = start_allreduce([wire], name, reducing, process_set, single_result, in_place=True)
        self._handle.poll()  # tells the coordinator now, not when somebody waits

    def wait(self) -> torch.Tensor:
        """Return the mean over the ranks that took part: all but those that have joined.

        Raises:
            MismatchError, StalledError, CollectiveError: See NamedHandle.wait.
        """
        result = self._handle.wait()
        if not isinstance(self._compression, RowCompressor):
            mean: torch.Tensor = self._compression.decompress(result, self._context)
            return mean
        total = torch.zeros_like(self._values)
        for row in result:
            self._compression.decode(row, total)
        return total.div_(len(result))
