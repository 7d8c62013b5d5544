"""All-reduce of sparse tensors by name: the indices and values of all ranks are gathered."""

from __future__ import annotations

import torch

from spark_hvd.collectives.execution import Work
from spark_hvd.collectives.handle import NamedHandle
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.collectives.start import start_allgather
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world.errors import MismatchError


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> NamedHandle[torch.Tensor]:
    """Start to add up sparse tensors of all ranks.

    Args:
        tensor: A sparse COO tensor of the same shape and dtype on every rank; each rank has elements of its own.
        name: Ranks match calls by name, in any order. None: such calls match by their order.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A handle whose wait() returns a coalesced sparse tensor; calling the handle does the same, as in Horovod.

    Raises:
        TypeError: `tensor` is not sparse.
        ValueError: `op` is another reduction, or the process set is not this rank's.
        MismatchError, DuplicateNameError, CollectiveError: See :func:`spark_hvd.torch.move.allgather`.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_sparse:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"expected a sparse COO tensor, got {kind}; dense tensors go by allreduce_async.")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op={op!r}: sparse tensors can be reduced with Average or Sum.")
    mine = tensor.detach().coalesce()
    shape = torch.tensor([mine.shape], device=mine.device)

    def result(work: Work) -> torch.Tensor:
        indices, values, shapes = work.results
        if not bool((shapes == shape).all()):
            raise MismatchError(
                f"sparse_allreduce of tensors of different shapes: {sorted(map(tuple, shapes.tolist()))}."
            )
        if op is ReduceOp.AVERAGE:
            values = values / shapes.shape[0]  # the ranks that contributed
        # Coalescing adds up the elements that several ranks have.
        return torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False).coalesce()

    return start_allgather([mine.indices().t().contiguous(), mine.values(), shape], name, process_set, result)
