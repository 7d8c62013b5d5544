"""Where the gradients of one optimizer have their place: in buckets, among the sparse ones, or nowhere yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spark_hvd.torch.optimizer.arguments import spec_of
from spark_hvd.torch.optimizer.buckets import MEGABYTE, ParamSpec, describe_mismatch, fingerprint, plan_buckets
from spark_hvd.torch.optimizer.flat import FlatBucket, Reduction, make_buckets
from spark_hvd.transport.host.hierarchy import HostSharing
from spark_hvd.world.errors import PlanMismatchError

# The last bucket has no backward left to hide behind: small enough to be all latency, it costs one round trip.
TAIL_BYTES = MEGABYTE

Exchange = Callable[[Any], list[Any]]
"""Gives every rank the facts of all ranks, in rank order."""


def require_same(
    specs: Sequence[ParamSpec], settings: dict[str, Any], exchange: Exchange, what: str = "DistributedOptimizer"
) -> None:
    """Go on only if all ranks have the same parameters and settings, as `what` needs them.

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
    """The same on every rank, as it is made from facts that all ranks have exchanged.

    Args:
        params: All parameters; the list may grow.
        specs: What they are, in the same order; brought up to date when a parameter gets its place.
        groups: Indices of parameters to keep in one bucket.
        reduction: How gradients are scaled and compressed.
        pipes: For buckets that are reduced in memory, between the ranks of one host, or the levels of several.
        cap_bytes: Upper bound of a bucket.
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
        self._placed: list[tuple[int, torch.nn.Parameter, torch.dtype, torch.Size, torch.device]] = []

    @property
    def made(self) -> bool:
        """Whether any parameter has its place."""
        return bool(self.buckets or self.sparse)

    def newcomers(self) -> list[int]:
        """The parameters without a place that are trained by now: added since, or unfrozen."""
        return [index for index in self.unplanned if self._params[index].requires_grad]

    def changed(self) -> list[int]:
        """The parameters in buckets whose dtype, shape or device is no longer that of their place."""
        return [
            index
            for index, param, dtype, shape, device in self._placed
            if param.dtype is not dtype or param.shape != shape or param.device != device
        ]

    def vacate(self, indices: Iterable[int]) -> None:
        """Take parameters out of their buckets, if they are in any; they are reduced as newcomers then."""
        for index in indices:
            for bucket in self.buckets:
                if index in bucket.members:
                    bucket.vacate(index)

    def drop_empty(self) -> None:
        """Do without the buckets that every parameter has left; to be called between steps."""
        for bucket in [bucket for bucket in self.buckets if not bucket.members]:
            self.buckets.remove(bucket)
            bucket.release()

    def kinds_here(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """What these parameters are on this rank now, to be compared with other ranks."""
        return [spec_of(self._specs[index].name, self._params[index]).fields() for index in indices]

    def recast(self, indices: Iterable[int]) -> list[int]:
        """Which of these are no longer what ranks have compared: another dtype, shape, layout or device."""
        specs = [(index, self._specs[index]) for index in indices]
        return [
            index
            for index, spec in specs
            if replace(spec_of(spec.name, self._params[index]), requires_grad=spec.requires_grad) != spec
        ]

    def require_same_kinds(self, kinds: Sequence[list[dict[str, Any]]]) -> None:
        """Go on only if what :meth:`kinds_here` found is the same on all ranks.

        Raises:
            PlanMismatchError: It differs; raised on every rank.
        """
        if any(each != kinds[0] for each in kinds):
            raise PlanMismatchError(
                "parameters were cast or moved since DistributedOptimizer was made, and "
                f"{describe_mismatch(kinds, [{}] * len(kinds))}. Change them alike on every rank"
            )

    def require_same_newcomers(self, newcomers: Sequence[list[int]], ranks: Sequence[int]) -> None:
        """Go on only if these are the same on all ranks.

        Args:
            newcomers: Of each rank that makes the step.
            ranks: Their numbers.

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
            "requires_grad was switched on, or the dtype changed, for different parameters on different ranks: "
            f"{'; '.join(lines)}, and not every rank does. Unfreeze the same parameters on every rank, and cast "
            "them alike"
        )

    def sparse_here(self, indices: Sequence[int]) -> list[int]:
        """Which parameters' gradients are to be gathered, going by what they are on this rank."""
        if self._reduction.sparse_as_dense:
            return []
        return [
            index
            for index in indices
            if (grad := self._params[index].grad) is not None and grad.layout is not torch.strided
        ]

    def place(self, order: Sequence[int], sparse: Iterable[int], exchange: Exchange) -> list[FlatBucket]:
        """Give parameters their places; collective.

        Args:
            order: Their indices, in the order in which their gradients become ready.
            sparse: Indices of those that are sparse on some rank.
            exchange: For the buckets' memory.

        Returns:
            The new buckets, which are the last ones now.
        """
        for index in order:
            self._specs[index] = spec_of(self._specs[index].name, self._params[index])
        gathered = sorted(set(sparse))
        dense = [index for index in order if index not in gathered]
        self.sparse.extend(gathered)
        placed = set(order)
        self._order = [index for index in self._order if index not in placed] + dense
        self.unplanned = [index for index in self.unplanned if index not in placed]
        return self._pack(dense, exchange)

    def pack_again(self, cap_bytes: int, exchange: Exchange, *, in_memory: bool) -> list[FlatBucket]:
        """Make other buckets for what has its place already; collective, with the same arguments on every rank.

        Args:
            cap_bytes: Upper bound of a bucket.
            exchange: For the buckets' memory.
            in_memory: Whether to reduce in shared memory, if there is a group for that.

        Returns:
            All buckets.
        """
        self._cap_bytes = cap_bytes
        self._in_memory = in_memory
        if not self.buckets:
            return []
        self.buckets.clear()
        return self._pack(self._order, exchange)

    def _pack(self, dense: Sequence[int], exchange: Exchange) -> list[FlatBucket]:
        cap = self._cap_bytes
        plans = plan_buckets(self._specs, dense, self.groups, cap_bytes=cap, tail_bytes=min(TAIL_BYTES, cap))
        pipes = self._pipes if self._in_memory else None
        fresh = make_buckets(plans, self._params, self._specs, self._reduction, pipes, exchange)
        self.buckets.extend(fresh)
        params = [(index, self._params[index]) for index in self._order]
        self._placed = [(index, param, param.dtype, param.shape, param.device) for index, param in params]
        return fresh
