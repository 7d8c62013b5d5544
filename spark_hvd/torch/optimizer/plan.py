"""Where each gradient of one optimizer belongs: in a bucket, among the sparse gradients, or nowhere yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spark_hvd.torch.optimizer.arguments import spec_of
from spark_hvd.torch.optimizer.buckets import MEGABYTE, ParamSpec, describe_mismatch, fingerprint, plan_buckets
from spark_hvd.torch.optimizer.flat import FlatBucket, Reduction, make_buckets
from spark_hvd.torch.optimizer.memory import BucketMemory
from spark_hvd.transport.host.hierarchy import HostSharing
from spark_hvd.world.errors import PlanMismatchError

# The last bucket cannot overlap with backward. This size is dominated by latency: it costs one round trip.
TAIL_BYTES = MEGABYTE

Exchange = Callable[[Any], list[Any]]
"""Returns the facts of all ranks, in rank order."""


def require_same(
    specs: Sequence[ParamSpec], settings: dict[str, Any], exchange: Exchange, what: str = "DistributedOptimizer"
) -> None:
    """Raise unless all ranks have the same parameters and settings, which `what` needs.

    Raises:
        PlanMismatchError: They differ; raised on every rank.
    """
    if len(set(exchange(fingerprint(specs, settings)))) == 1:
        return
    facts = exchange([[spec.fields() for spec in specs], settings])
    difference = describe_mismatch([fact[0] for fact in facts], [fact[1] for fact in facts])
    raise PlanMismatchError(
        f"{what} needs the same parameters on every rank, but {difference}. "
        f"Build model and optimizer in the same way on every rank"
    )


class GradientPlan:
    """The places of all gradients; equal on every rank, as it is made from facts that all ranks have exchanged.

    ``params`` may grow, and ``specs`` with them. ``groups`` are indices of parameters to keep in one bucket.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: list[ParamSpec],
        groups: Sequence[Sequence[int]],
        reduction: Reduction,
        pipes: HostSharing | None,
        cap_bytes: int,
    ) -> None:
        self.buckets: list[FlatBucket] = []
        """The buckets, in the order in which they are launched."""
        self._memory = BucketMemory(self.buckets)
        self.sparse: list[int] = []
        """Indices of the parameters whose gradients are gathered."""
        self.unplanned: list[int] = []
        """Indices of the parameters without a place."""
        self._params = params
        self._specs = specs
        self.groups = groups
        self._reduction = reduction
        self._pipes = pipes
        self._in_memory = pipes is not None
        self._cap_bytes = cap_bytes
        self._order: list[int] = []

    @property
    def made(self) -> bool:
        """Whether any parameter has a place."""
        return bool(self.buckets or self.sparse)

    def newcomers(self) -> list[int]:
        """Return parameters without a place that are trained now, because they were added or unfrozen."""
        return [index for index in self.unplanned if self._params[index].requires_grad]

    def require_same_newcomers(self, newcomers: Sequence[list[int]], ranks: Sequence[int]) -> None:
        """Raise unless these are the same on all ranks.

        Raises:
            PlanMismatchError: They differ; raised on every rank.
        """
        everywhere = set(newcomers[0]).intersection(*newcomers)
        if all(everywhere.issuperset(indices) for indices in newcomers):
            return
        lines = [
            f"rank {rank} trains {', '.join(repr(self._specs[index].name) for index in more)}"
            for rank, indices in zip(ranks, newcomers, strict=True)
            if (more := [index for index in indices if index not in everywhere])
        ]
        raise PlanMismatchError(
            "requires_grad was switched on for different parameters on different ranks: "
            f"{'; '.join(lines)}, and not every rank does. Unfreeze the same parameters on every rank"
        )

    def changed_here(self, indices: Iterable[int] | None = None) -> list[list[Any]]:
        """Return the index and the fields of each parameter that no longer matches the plan.

        By default, this checks all parameters that are trained or have a place.
        """
        if indices is None:
            frozen = {index for index in self.unplanned if not self._params[index].requires_grad}
            indices = [index for index in range(len(self._params)) if index not in frozen]
        found: list[list[Any]] = []
        for index in indices:
            spec = self._specs[index]
            now = replace(spec_of(spec.name, self._params[index]), requires_grad=spec.requires_grad)
            if now != spec:
                found.append([index, now.fields()])
        return found

    def take_changes(self, changes: Sequence[list[list[Any]]], ranks: Sequence[int]) -> None:
        """Update the plan's specifications to the present parameters.

        Raises:
            PlanMismatchError: Parameters have changed differently; raised on every rank.
        """
        for rank, found in zip(ranks, changes, strict=True):
            if found != changes[0]:
                raise PlanMismatchError(self._difference(dict(changes[0]), dict(found), ranks[0], rank))
        for index, fields in changes[0]:
            here = str(self._params[index].device)
            kind = fields["device type"]
            self._specs[index] = self._specs[index].with_fields(fields, here if here.startswith(kind) else kind)

    def _difference(self, first: dict[int, Any], other: dict[int, Any], first_rank: int, rank: int) -> str:
        index = min(index for index in {*first, *other} if first.get(index) != other.get(index))
        before = self._specs[index].fields()
        ours, theirs = first.get(index, before), other.get(index, before)
        key = next(key for key in ours if ours[key] != theirs[key])
        return (
            f"parameter {before['name']!r} has changed since the optimizer was made, but differently on each rank: its "
            f"{key} is {ours[key]!r} on rank {first_rank} and {theirs[key]!r} on rank {rank}. Cast, move and reshape "
            "parameters in the same way on every rank"
        )

    def withdraw(self, indices: Sequence[int]) -> None:
        """Remove parameters from places that their gradients do not fit into.

        They must be the same on every rank, in a step whose buckets have been received.

        Raises:
            PlanMismatchError: A gradient fits on some ranks; raised on every rank.
        """
        for index in indices:
            if any(index in bucket.members and bucket.was_used(index) for bucket in self.buckets):
                raise PlanMismatchError(
                    f"the gradient of {self._specs[index].name!r} lacks the dtype, shape or device of its parameter "
                    "on some ranks, or its parameter was changed on some ranks only. Cast, move and reshape "
                    "parameters in the same way on every rank, between step() and backward()"
                )
        self._order = [index for index in self._order if index not in indices]
        self.unplanned.extend(indices)

    def require_fit(self, first: int) -> None:
        """Raise unless gradients fit into the new buckets from number `first` on, which have been received.

        Raises:
            PlanMismatchError: A gradient does not fit; raised on every rank.
        """
        for bucket in self.buckets[first:]:
            if bucket.tells_of_misfits:
                raise PlanMismatchError(
                    f"a gradient of {', '.join(bucket.names)} cannot be kept by its parameter on some rank: expected "
                    "the dtype, shape and device of the parameter. Do not change grad_dtype"
                )

    def is_cleared(self, index: int) -> bool:
        """Return whether reduced gradients were zeroed or dropped before parameter `index`'s gradient was added to."""
        if not any(bucket.holds_gradients for bucket in self.buckets):
            return True
        held = [bucket.held_beside(index) for bucket in self.buckets]
        # If it is alone, this cannot be known. An average of equal numbers is the same number, so it does no harm.
        return not any(map(any, held)) and (any(held) or self._reduction.average)

    def sparse_here(self, indices: Sequence[int]) -> list[int]:
        """Return the parameters whose gradients must be gathered, as far as this rank can tell from them."""
        if self._reduction.sparse_as_dense:
            return []
        return [
            index
            for index in indices
            if (grad := self._params[index].grad) is not None and grad.layout is not torch.strided
        ]

    def place(self, order: Sequence[int], sparse: Iterable[int], exchange: Exchange) -> list[FlatBucket]:
        """Give parameters their places; collective.

        ``order`` lists indices as their gradients become ready; ``sparse`` those that are sparse on some rank.

        Returns:
            The new buckets, which are now the last ones.
        """
        gathered = sorted(set(sparse))
        dense = [index for index in order if index not in gathered]
        self.sparse.extend(gathered)
        self._order += dense
        placed = set(order)
        self.unplanned = [index for index in self.unplanned if index not in placed]
        return self._pack(dense, exchange)

    def resize(self, cap_bytes: int, *, in_memory: bool) -> None:
        """Set how :meth:`pack_again` makes buckets."""
        self._cap_bytes = cap_bytes
        self._in_memory = in_memory

    def pack_again(self, exchange: Exchange) -> list[FlatBucket]:
        """Make new buckets for the parameters that already have a place; collective.

        Returns:
            All buckets.
        """
        if not self.buckets:
            return []
        self.buckets.clear()
        return self._pack(self._order, exchange)

    def _pack(self, dense: Sequence[int], exchange: Exchange) -> list[FlatBucket]:
        cap = self._cap_bytes
        plans = plan_buckets(self._specs, dense, self.groups, cap_bytes=cap, tail_bytes=min(TAIL_BYTES, cap))
        pipes = self._pipes if self._in_memory else None
        fresh = make_buckets(plans, self._params, self._specs, self._reduction, pipes, exchange, self._memory)
        self.buckets.extend(fresh)
        self._memory.changed()
        return fresh
