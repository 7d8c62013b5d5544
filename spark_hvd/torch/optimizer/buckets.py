"""Plans which parameters share a bucket, for DistributedOptimizer, and checks that ranks agree on it.

Nothing here touches a tensor or a network, so every rule can be tested on plain data. A bucket is a run of parameters
of one dtype and one device whose gradients lie in one flat buffer and are reduced by one all-reduce.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

ALIGNMENT = 64  # bytes; each gradient starts on a cache line, which helps vectorised and CUDA foreach kernels
MEGABYTE = 1 << 20
SMALL = 16  # a gradient smaller than 1/SMALL of the cap never opens a bucket


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What ranks must agree on about one parameter.

    Attributes:
        name: the user's name for it, or one generated from its position in the optimizer.
        shape: its sizes.
        stride: its strides, in elements; they matter because the flat buffer is summed in memory order.
        dtype: its torch dtype.
        device: "cpu", "cuda:1" ...; ranks compare only the part before the colon.
        requires_grad: whether it is trained; other parameters take no place in a bucket.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool = True

    def with_fields(self, fields: Mapping[str, Any], device: str) -> ParamSpec:
        """Return a copy with other :meth:`fields`, on a device of their type."""
        shape, stride = tuple(fields["shape"]), tuple(fields["stride"])
        dtype = getattr(torch, fields["dtype"].removeprefix("torch."))
        return replace(self, shape=shape, stride=stride, dtype=dtype, device=device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Size of its gradient in bytes."""
        return self.numel * self.dtype.itemsize

    def fields(self) -> dict[str, Any]:
        """Return the compared fields, as values that JSON can carry."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "device type": self.device.partition(":")[0],
            "requires_grad": self.requires_grad,
            "stride": list(self.stride),
        }


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket.

    ``members`` are indices in the order in which gradients become ready; ``offsets`` and ``numel`` (which includes
    padding) count elements.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def plan_buckets(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    groups: Sequence[Sequence[int]] = (),
    *,
    cap_bytes: int,
    tail_bytes: int,
) -> tuple[BucketPlan, ...]:
    """Pack parameters into buckets, listed in the order in which they complete.

    Packing runs from the last gradient to the first. The bucket that completes last cannot overlap with backward, so
    `tail_bytes` limits it alone, and `cap_bytes` all others. A parameter larger than its cap fills a bucket by itself,
    but a small one joins its neighbour even beyond the cap: a layer's bias becomes ready with its weight, and would
    delay the bucket before. Each group of `groups` is one bucket, whatever its size (one per dtype and device).

    Args:
        specs: all parameters.
        order: indices of those to place, in the order in which their gradients become ready.
        groups: indices of parameters to keep together; those not in `order` are ignored.
        cap_bytes: upper bound for a bucket.
        tail_bytes: upper bound for the bucket that completes last.
    """
    position = {index: place for place, index in enumerate(order)}
    packs: list[list[int]] = []
    grouped: set[int] = set()
    for group in groups:
        by_kind: dict[tuple[str, torch.dtype], list[int]] = {}
        for index in group:
            if index in position:
                grouped.add(index)
                by_kind.setdefault((specs[index].device, specs[index].dtype), []).append(index)
        packs.extend(by_kind.values())

    open_packs: dict[tuple[str, torch.dtype], tuple[list[int], int]] = {}
    cap = tail_bytes
    for index in reversed(order):
        if index in grouped:
            continue
        spec = specs[index]
        kind = (spec.device, spec.dtype)
        pack, used = open_packs.get(kind, ([], 0))
        if pack and used + spec.nbytes > cap and spec.nbytes > cap // SMALL:
            packs.append(pack)
            pack, used, cap = [], 0, cap_bytes
        pack.append(index)
        open_packs[kind] = (pack, used + spec.nbytes)
    packs.extend(pack for pack, _ in open_packs.values())

    for pack in packs:
        pack.sort(key=position.__getitem__)
    packs.sort(key=lambda pack: position[pack[-1]])
    return tuple(_lay_out(pack, specs) for pack in packs)


def _lay_out(members: Sequence[int], specs: Sequence[ParamSpec]) -> BucketPlan:
    offsets = []
    end = 0
    for index in members:
        step = max(1, ALIGNMENT // specs[index].dtype.itemsize)
        start = -(-end // step) * step
        offsets.append(start)
        end = start + specs[index].numel
    return BucketPlan(tuple(members), tuple(offsets), end)


def split_evenly(indices: Sequence[int], parts: int) -> list[list[int]]:
    """Cut `indices` into at most `parts` runs whose lengths differ by at most one (`groups=<int>`)."""
    parts = min(parts, len(indices))
    bounds = [len(indices) * part // parts for part in range(parts + 1)] if parts else []
    return [list(indices[start:stop]) for start, stop in pairwise(bounds)]


def fingerprint(specs: Sequence[ParamSpec], settings: Mapping[str, Any]) -> str:
    """Return a digest that is equal on two ranks only if their parameters and settings are equal."""
    text = json.dumps([[spec.fields() for spec in specs], dict(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def describe_mismatch(
    params_by_rank: Sequence[Sequence[Mapping[str, Any]]], settings_by_rank: Sequence[Mapping[str, Any]]
) -> str:
    """Say in one sentence where the first differing rank differs from rank 0."""
    first = params_by_rank[0]
    for rank, params in enumerate(params_by_rank):
        for index, (ours, theirs) in enumerate(zip(first, params, strict=False)):
            wrong = [key for key in ours if ours[key] != theirs[key]]
            if wrong:
                key = wrong[0]
                return (
                    f"parameter {index} differs between ranks: {ours['name']!r} on rank 0 has {key} {ours[key]!r}, "
                    f"{theirs['name']!r} on rank {rank} has {key} {theirs[key]!r}"
                )
        if len(params) != len(first):
            longer, owner = (params, rank) if len(params) > len(first) else (first, 0)
            extra = longer[min(len(params), len(first))]["name"]
            return (
                f"rank 0 has {len(first)} parameters and rank {rank} has {len(params)}: "
                f"{extra!r} exists on rank {owner} only"
            )
        for key, value in settings_by_rank[0].items():
            if settings_by_rank[rank][key] != value:
                return f"{key} is {value!r} on rank 0 and {settings_by_rank[rank][key]!r} on rank {rank}"
    raise AssertionError("ranks agree")
