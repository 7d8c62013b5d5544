"""Sparse gradients in a gradient reducer: every rank gathers the indices and values of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from spark_hvd.torch.optimizer.participation import Participation, Presence
from spark_hvd.world.errors import PlanMismatchError

AllGather = Callable[[torch.Tensor], list[torch.Tensor]]


def reduce_sparse(
    params: Sequence[torch.nn.Parameter],
    presence: Presence,
    scale_for: Callable[[Participation], float],
    all_gather: AllGather,
) -> Participation:
    """Replace each parameter's sparse gradient with the sum over all ranks, times `scale`; collective.

    A rank that has no gradient, or has joined, contributes nothing. If no rank has a gradient for a parameter, it stays
    None. The result is coalesced, so all ranks hold the same bits.

    Args:
        params: parameters with sparse gradients (one sparse dimension, as nn.Embedding(sparse=True) makes), the same
            on every rank.
        presence: this rank's own; if it has joined, its gradients are not changed.
        scale_for: returns 1 / number of ranks for Average, 1 for Sum.
        all_gather: returns the tensors of all ranks, of one shape, in rank order.

    Returns:
        All ranks' presence.

    Raises:
        PlanMismatchError: Parameters differ between ranks; raised on every rank.
    """
    device = params[0].device
    joined = presence >= Presence.JOINED
    parts = [None if param.grad is None or joined else _coalesced(param.grad) for param in params]
    # -1 distinguishes "no gradient here" from "a gradient of no rows".
    counts = [-1 if part is None else part.indices().shape[1] for part in parts]
    kind = zlib.crc32(repr([(param.dtype, *param.shape) for param in params]).encode())
    table = torch.stack(all_gather(torch.tensor([*counts, kind, presence], device=device))).tolist()
    if any(row[-2] != kind for row in table):
        raise PlanMismatchError(
            "parameters with sparse gradients differ between ranks in dtype or shape; on this rank: "
            f"{[(str(param.dtype), *param.shape) for param in params]}. "
            "Cast and reshape parameters in the same way on every rank"
        )
    participation = Participation.of([row[-1] for row in table])
    scale = scale_for(participation)
    for place, (param, part) in enumerate(zip(params, parts, strict=True)):
        rows = [row[place] for row in table]
        if max(rows) >= 0:
            reduced = _gather(param, part, rows, scale, all_gather)
            if not joined:
                param.grad = reduced
    return participation


def _coalesced(grad: torch.Tensor) -> torch.Tensor:
    # A tied weight may add a dense gradient to the sparse one, which makes the sum dense.
    return grad.coalesce() if grad.is_sparse else grad.to_sparse(1)


def _gather(
    param: torch.nn.Parameter, part: torch.Tensor | None, rows: Sequence[int], scale: float, all_gather: AllGather
) -> torch.Tensor:
    longest = max(rows)
    indices = torch.zeros(longest, dtype=torch.int64, device=param.device)
    values = torch.zeros((longest, *param.shape[1:]), dtype=param.dtype, device=param.device)
    if part is not None:
        count = part.indices().shape[1]
        indices[:count] = part.indices()[0]
        values[:count] = part.values()
    all_indices, all_values = (all_gather(part) if longest else [part for _ in rows] for part in (indices, values))
    kept_indices = torch.cat(
        [rank_indices[: max(count, 0)] for rank_indices, count in zip(all_indices, rows, strict=True)]
    )
    kept_values = torch.cat([rank_values[: max(count, 0)] for rank_values, count in zip(all_values, rows, strict=True)])
    gathered = torch.sparse_coo_tensor(
        kept_indices.unsqueeze(0), kept_values * scale, param.shape, check_invariants=False
    )
    return gathered.coalesce()
