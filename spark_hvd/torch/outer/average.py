"""The mean over the ranks of one flat tensor, under way in the background."""

from __future__ import annotations

from typing import Any

import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.execution import single_result
from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.collectives.start import Reducing, start_allgather, start_allreduce
from spark_hvd.torch.outer.compressors import RowCompressor
from spark_hvd.transport.communicator import ReduceOp


class Averaging:
    """Starts when it is made.

    Args:
        values: One-dimensional; it is overwritten.
        name: By which the ranks match it.
        compression: A RowCompressor, or one with `compress` and `decompress`.
        process_set: Whose ranks take part.

    Attributes:
        lost: What compression has lost of `values`; None where nobody is to keep it.
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
        self._handle.poll()  # the coordinator is to hear of it now, not when somebody waits

    def wait(self) -> torch.Tensor:
        """The mean over the ranks that have taken part: all but those that have joined.

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
