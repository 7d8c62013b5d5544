"""ShardedEmbedding: a table whose rows are divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from spark_hvd.context.global_state import current, in_world
from spark_hvd.context.local import mark_local
from spark_hvd.torch.embedding.look_up import look_up
from spark_hvd.torch.embedding.routes import Cut
from spark_hvd.torch.embedding.whole import note_cut
from spark_hvd.transport.host.pages import prefer_huge

T = TypeVar("T", bound="ShardedEmbedding")
_MODES = (None, "sum", "mean")


class ShardedEmbedding(nn.Module):
    """An embedding table of which each rank holds some rows, but which is looked up and trained as a whole.

    Its weight is a rank-local parameter: DistributedOptimizer does not reduce it, and nothing broadcasts it. Its
    gradient is the mean over the ranks, as for an nn.Embedding under DistributedOptimizer. Without a world, this
    process holds the whole table. Calls are collective: every rank calls its tables in the same order, forward and
    backward.

    Args:
        rows: Number of rows of the whole table; at least the number of ranks.
        dim: Number of elements per row.
        name: The table's name in errors.
        mode: "sum" or "mean" make bags, as nn.EmbeddingBag does; None: each id has its row.
        padding_idx: The id whose row is zeros and is not trained; bags ignore it.
        sparse: Whether gradients are sparse, for SparseAdam, RowWiseAdagrad, Adagrad and SGD; else they are dense, of
            the size of this rank's rows.
        initialize: Fills this rank's rows; by default from N(0, 1), with different numbers in each row.
        dtype: The weight's dtype.
        device: The weight's device.

    Attributes:
        weight: This rank's rows, shape (rows of this rank, dim): row ``i`` is row ``i // size`` of rank ``i % size``.
        cut: Describes which rows these are.

    Raises:
        ValueError: An argument is invalid; the message says which.
    """

    __module__: str = "spark_hvd.torch"

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        name: str = "embedding",
        mode: str | None = None,
        padding_idx: int | None = None,
        sparse: bool = True,
        initialize: Callable[[torch.Tensor], Any] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.cut = _cut_for_here(rows)
        if rows < self.cut.size or dim < 1:
            raise ValueError(
                f"ShardedEmbedding({rows}, {dim}) of {name!r}: expected a row for each of the {self.cut.size} ranks "
                "and a dim of at least 1; use nn.Embedding for small tables"
            )
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r} of the table {name!r}: expected one of {_MODES}")
        if padding_idx is not None and not 0 <= padding_idx < rows:
            raise ValueError(f"padding_idx={padding_idx} is not in the table {name!r} of {rows:,} rows")
        self.rows, self.dim, self.name = rows, dim, name
        self.mode, self.padding_idx, self.sparse = mode, padding_idx, sparse
        self.weight = nn.Parameter(prefer_huge(torch.empty(self.cut.here, dim, dtype=dtype, device=device)))
        with torch.no_grad():
            if initialize is None:
                # Ranks with the same seed must not give different ids the same row.
                seed = int(torch.randint(2**31, (), device="cpu")) * self.cut.size + self.cut.rank
                self.weight.normal_(generator=torch.Generator(self.weight.device).manual_seed(seed))
            else:
                initialize(self.weight)
            if padding_idx is not None and self._local_padding() is not None:
                self.weight[self._local_padding()] = 0

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Look up rows; collective.

        Args:
            ids: int64 or int32, of any shape. With a `mode`, of shape (bags, ids per bag), or (ids,) with `offsets`.
            offsets: Index in `ids` at which each bag begins, shape (bags,).

        Returns:
            Shape (each dimension of the ids, dim), or (bags, dim) with a `mode`.

        Raises:
            IndexError, TypeError, ValueError, CollectiveError: See :func:`spark_hvd.torch.look_up`.
        """
        [rows] = look_up([self], [ids])
        return rows if self.mode is None else self._bags(rows, ids, offsets)

    def _bags(self, rows: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        if ids.dim() != (2 if offsets is None else 1):
            raise ValueError(
                f"ids of the table {self.name!r} have shape {tuple(ids.shape)}: bags need (bags, ids per bag), or "
                "(ids,) with offsets="
            )
        counted = torch.ones_like(ids, dtype=rows.dtype)
        if self.padding_idx is not None:
            counted = (ids != self.padding_idx).to(rows.dtype)
            rows = rows * counted.unsqueeze(-1)
        if offsets is None:
            total, count = rows.sum(1), counted.sum(1)
        else:
            ends = torch.cat([offsets[1:], offsets.new_tensor([len(ids)])])
            bag = torch.repeat_interleave(torch.arange(len(offsets), device=ids.device), ends - offsets)
            total = rows.new_zeros(len(offsets), self.dim).index_add(0, bag, rows)
            count = counted.new_zeros(len(offsets)).index_add(0, bag, counted)
        return total / count.clamp(min=1).unsqueeze(-1) if self.mode == "mean" else total

    def gradient(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the weight's gradient, given the gradients of its rows `ids`, which may repeat."""
        padding = self._local_padding()
        if padding is not None:
            kept = ids != padding
            ids, values = ids[kept], values[kept]
        if not self.sparse:
            return torch.zeros_like(self.weight).index_add_(0, ids, values)
        return torch.sparse_coo_tensor(ids.long().unsqueeze(0), values, self.weight.shape, check_invariants=False)

    def require_cut_for_here(self) -> None:
        """Raise a ValueError if the table was divided for another world."""
        here = _cut_for_here(self.rows)
        if self.cut != here:
            raise ValueError(
                f"the table {self.name!r} is rank {self.cut.rank}'s of {self.cut.size} ranks, but this is rank "
                f"{here.rank} of {here.size}: make it inside the function that run() calls, or load a whole state "
                "into it after table.cut_again()"
            )
        if len(self.weight) != here.here:
            raise ValueError(
                f"the weight of the table {self.name!r} has {len(self.weight):,} rows, and this rank has {here.here:,} "
                f"of its {self.rows:,}: load whole tables with table.load_state_dict({{'weight': whole}})"
            )

    def cut_again(self) -> None:
        """Make the weight hold this rank's rows in the present world; not collective.

        A whole table keeps its values. Otherwise the rows are undefined until a whole state is loaded.
        """
        here = _cut_for_here(self.rows)
        if here == self.cut:
            return
        with torch.no_grad():
            if self.cut.size == 1:
                self.weight.data = here.take(self.weight.data)
            else:
                self.weight.data = self.weight.data.new_zeros(here.here, self.dim)
        self.weight.grad = None
        self.cut = here
        self._note()

    def _local_padding(self) -> int | None:
        """Return the local index of the padding row, if this rank holds it."""
        pad = self.padding_idx
        return None if pad is None or pad % self.cut.size != self.cut.rank else pad // self.cut.size

    def _note(self) -> None:
        mark_local(self.weight, averaged=True)
        note_cut(self.weight, self.cut, self.name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        metadata["cut"] = self.cut.rank, self.cut.size  # parts of several ranks may look alike

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key, mine = prefix + "weight", (self.cut.rank, self.cut.size)
        value, cut = state_dict.get(key), tuple(args[0].get("cut", mine))
        if value is not None and cut != mine and len(value) == self.cut.here < self.rows:
            args[-1].append(
                f"the table {self.name!r} has rows of rank {mine[0]} of {mine[1]} here, and {key!r} has those of rank "
                f"{cut[0]} of {cut[1]}: load a whole state, see hvd.whole_state_dict"
            )
            return
        if value is not None and len(value) != self.cut.here:
            if len(value) != self.rows:
                args[-1].append(
                    f"the table {self.name!r} has {self.rows:,} rows, {self.cut.here:,} of them on this rank of "
                    f"{self.cut.size}, and {key!r} has {len(value):,}: load a whole state, see hvd.whole_state_dict"
                )
                return
            state_dict = {**state_dict, key: self.cut.take(value)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See nn.Module; a weight that is assigned comes here, too, such as by ``load_state_dict(assign=True)``."""
        super().register_parameter(name, param)
        if self._parameters.get("weight") is not None:
            self._note()

    def _apply(self: T, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> T:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._note()  # torch may have made another parameter
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._note()  # a copy

    def extra_repr(self) -> str:
        """See nn.Module."""
        return f"{self.rows}, {self.dim}, name={self.name!r}, rows {self.cut.rank}::{self.cut.size} here"


def _cut_for_here(rows: int) -> Cut:
    if not in_world():
        return Cut(rows, 0, 1)
    me = current().communicator
    return Cut(rows, me.rank, me.size)
