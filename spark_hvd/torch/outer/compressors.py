"""The mean of a flat tensor over the ranks, and compressors whose results cannot be summed in transit.

With such a compressor, each rank gathers what all ranks have sent, and decodes it. A rank keeps its compression error
and adds it to what it sends next: error feedback, as in Seide et al., "1-Bit Stochastic Gradient Descent"
(Interspeech 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch.nn.functional import pad

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.execution import single_result
from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.collectives.start import Reducing, start_allgather, start_allreduce
from spark_hvd.transport.communicator import ReduceOp

_TINY = torch.finfo(torch.float32).tiny
_PIECE = 2**18
"""Number of elements of a CPU tensor that are processed at a time, so that they and the results stay in the cache."""
_PIECE_ELSEWHERE = 2**30
"""The same for other devices, where a kernel is worth its launch only if it is large. An int32 can index as many."""


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of tensors of equal shapes, part by part. A part is small enough to stay in a core's cache."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _PIECE:
        yield tensors
    else:
        rows = max(1, _PIECE * len(first) // first.numel())
        yield from zip(*(torch.split(each, rows) for each in tensors), strict=True)


@runtime_checkable
class RowCompressor(Protocol):
    """Turns numbers into a row of bytes, of equal length on every rank, and back; a piece of a tensor at a time."""

    def unit(self) -> int:
        """Return a number of values that divides the length of each piece, except of a tensor's last one."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode some values, and replace them with their compression errors.

        Args:
            values: One-dimensional, float32 or float64, at least one.

        Returns:
            One-dimensional, uint8. Its length is a multiple of four that depends only on the number of values.
        """

    def mean(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write the mean of encoded rows (rows, bytes) to `out`, which has the shape and dtype of the values."""


class _BlockCompressor:
    """Sends an integer of a few bits for each number, and a float32 scale for each block of numbers.

    The scale is the largest absolute value of the block, divided by the largest integer. All blocks of a piece
    have the same length, so that little is padded.
    """

    _levels: ClassVar[int]
    """The largest integer."""
    _per_byte: ClassVar[int]

    def __init__(self, block_size: int = 256) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r}: expected a whole number of 1 or more, such as 256")
        self.block_size = block_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block_size={self.block_size})"

    def unit(self) -> int:
        """See RowCompressor."""
        return self.block_size * self._per_byte

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See RowCompressor."""
        blocks = self._blocks(values)
        # A block of zeros can have any scale. A non-finite number makes its scale non-finite, and so all decoded
        # numbers of its block. The integers are 0 there, as another block may share their bytes.
        scales = torch.maximum(blocks.amax(1), -blocks.amin(1)).div_(self._levels).clamp_(min=_TINY).float()
        exact = scales.to(blocks.dtype)[:, None]
        whole = (blocks * exact.reciprocal()).round_().nan_to_num_(0.0, 0.0, 0.0)
        numbers = self._pack(whole).flatten().view(torch.uint8)
        blocks.addcmul_(whole, exact, value=-1)
        self._write(blocks, values)
        # Rows are stored one after another, and the scales of each must begin at a multiple of four bytes.
        rest = -len(numbers) % 4
        return torch.cat([scales.view(torch.uint8), pad(numbers, (0, rest)) if rest else numbers])

    def mean(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See RowCompressor."""
        mean = self._blocks(out)
        length = mean.numel() // self._per_byte
        for number, row in enumerate(rows):
            scales = row[: 4 * len(mean)].view(torch.float32).to(mean.dtype)[:, None] / len(rows)
            numbers = row[4 * len(mean) :][:length].view(torch.int8).to(mean.dtype).view(-1, mean.shape[1])
            parts = (each.chunk(self._per_byte) for each in (mean, scales))
            for part, scale, whole in zip(*parts, self._unpack(numbers), strict=True):
                if number:
                    part.addcmul_(whole, scale)
                else:
                    torch.mul(whole, scale, out=part)
        self._write(mean, out)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as (blocks, numbers); each part of a byte has as many blocks. A view or a copy."""
        count = -(-len(values) // self.unit()) * self._per_byte
        missing = -len(values) % count
        return (pad(values, (0, missing)) if missing else values).view(count, -1)

    def _write(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        if blocks.data_ptr() != values.data_ptr():
            values.copy_(blocks.view(-1)[: len(values)])

    def _pack(self, whole: torch.Tensor) -> torch.Tensor:
        """Pack integers (blocks, numbers) into bytes, int8."""
        raise NotImplementedError

    def _unpack(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the integers in some bytes (floats), as many tensors as a byte has numbers."""
        raise NotImplementedError


class Int8Compressor(_BlockCompressor):
    """Sends an int8 for each number and a float32 scale for each block: about a quarter of float32's bytes.

    Every rank receives the rows of all others, so with n ranks a link carries (n - 1) bytes per number. An all-reduce
    of float32 carries 8 (n - 1) / n, which is more below 8 ranks.

    Args:
        block_size: How many numbers share a scale, at most. The scale is the largest absolute value divided by 127.

    Raises:
        ValueError: `block_size` is not a positive whole number.
    """

    __module__ = "spark_hvd.torch"
    _levels, _per_byte = 127, 1

    def _pack(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.to(torch.int8)

    def _unpack(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (numbers,)


class Int4Compressor(_BlockCompressor):
    """Sends four bits for each number and a float32 scale for each block: about an eighth of float32's bytes.

    As with :class:`Int8Compressor` every rank receives the rows of all others: with n ranks a link carries (n - 1) / 2
    bytes per number, less than an all-reduce of float32 below 16 ranks.

    Args:
        block_size: How many numbers share a scale, at most. The scale is the largest absolute value divided by 7.

    Raises:
        ValueError: `block_size` is not a positive whole number.
    """

    __module__ = "spark_hvd.torch"
    _levels, _per_byte = 7, 2

    def _pack(self, whole: torch.Tensor) -> torch.Tensor:
        low, high = whole.chunk(2)
        return low.add(high, alpha=16).to(torch.int8)

    def _unpack(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        high = (numbers / 16).round_()  # the low one is less than half of 16
        return numbers.sub_(high, alpha=16), high


class TopKCompressor:
    """Sends only the numbers with the largest absolute values, as a float32 and an int32 each.

    They are chosen among all parameters of a fragment; on a CPU, among each 262,144 consecutive numbers of it.

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

    def unit(self) -> int:
        """See RowCompressor."""
        return 1

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """See RowCompressor."""
        count = math.ceil(self.ratio * len(values))
        places = values.abs().topk(count, sorted=False).indices
        sent = values[places].float()
        values[places] -= sent
        return torch.cat([sent.view(torch.uint8), places.int().view(torch.uint8)])

    def mean(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See RowCompressor."""
        out.zero_()
        half = rows.shape[1] // 2
        for row in rows:
            out.index_add_(0, row[half:].view(torch.int32), row[:half].view(torch.float32).to(out.dtype))
        out.div_(len(rows))


class Averaging:
    """The mean of one flat tensor over the ranks.

    Attributes:
        lost: The compression error of `values`; None if nobody needs to keep it.
    """

    lost: torch.Tensor | None = None

    def __init__(
        self, values: torch.Tensor, name: str, compression: Any = Compression.none, *, process_set: ProcessSet
    ) -> None:
        """`values` are one-dimensional, and may be written later: :meth:`written` counts them."""
        self._compression, self._name, self._process_set = compression, name, process_set
        self._values = values
        self._by_row = isinstance(compression, RowCompressor)
        if self._by_row:
            most, unit = _PIECE if values.device.type == "cpu" else _PIECE_ELSEWHERE, compression.unit()
            self._piece = max(most // unit, 1) * unit
        self._ready = 0
        self._rows: list[torch.Tensor] = []

    def written(self, count: int) -> None:
        """Count another `count` values as written, and compress whole pieces while they are in the cache."""
        self._ready += count
        while self._by_row and self._ready - len(self._rows) * self._piece >= self._piece:
            self._encode()

    def _encode(self) -> None:
        start = len(self._rows) * self._piece
        self._rows.append(self._compression.encode(self._values[start : start + self._piece]))

    def start(self) -> None:
        """Start the exchange; all values have been written, and the exchange overwrites them."""
        if self._by_row:
            if len(self._rows) * self._piece < len(self._values):
                self._encode()
            self.lost = self._values
            self._lengths = [len(row) for row in self._rows]
            row = torch.cat([*self._rows, self._values.new_empty(0, dtype=torch.uint8)])[None]
            self._rows = []
            self._handle = start_allgather([row], self._name, self._process_set, single_result)
        else:
            wire, self._context = self._compression.compress(self._values)
            reducing = Reducing(ReduceOp.AVERAGE)
            self._handle = start_allreduce(
                [wire], self._name, reducing, self._process_set, single_result, in_place=True
            )
        self._handle.poll()  # tells the coordinator now, not when a thread waits

    def wait(self) -> None:
        """Wait until the exchange is complete.

        Raises:
            MismatchError, StalledError, CollectiveError: See NamedHandle.wait.
        """
        self._result = self._handle.wait()

    def mean(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks that took part: all but those that have joined.

        It may use `memory`, which has the shape and dtype of the values.
        """
        if not self._by_row:
            return cast(torch.Tensor, self._compression.decompress(self._result, self._context))
        rows = torch.split(self._result, self._lengths, dim=1)
        for each, out in zip(rows, torch.split(memory, self._piece), strict=False):  # of nothing, split makes one piece
            self._compression.mean(each, out)
        return memory
