"""Checks whether the ranks' requests for one name match; if not, one sentence names the ranks and both values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_hvd.collectives.messages import Request
from spark_hvd.world.words import ranks_text, shortened


def disagreement(
    name: str, requests: Mapping[int, Request], joined: Sequence[int] = (), *, horovod: bool = False
) -> str | None:
    """Return one sentence that says what is wrong with a collective.

    Joined ranks have no request. In Horovod's dialect, only an allreduce can run without them.

    Returns:
        None if it can run.
    """
    groups = _grouped(requests)
    first = groups[0][0]
    title = f"{first.kind} {name!r}"
    for request, ranks in groups:
        if request.fault is not None:
            return f"{title} cannot run: on rank {ranks[0]} {request.fault}."
    fault = _difference_fault(name, title, first.kind, groups) if len(groups) > 1 else None
    return fault or _joined_fault(title, first, joined, horovod)


_Groups = list[tuple[Request, list[int]]]
"""Requests, and the ranks that made them."""


def _grouped(requests: Mapping[int, Request]) -> _Groups:
    """Group requests by object: ranks often share one, and then need not be compared one by one."""
    if len(set(map(id, requests.values()))) == 1:  # the usual case
        return [(next(iter(requests.values())), list(requests))]
    groups: dict[int, tuple[Request, list[int]]] = {}
    for rank, request in requests.items():
        groups.setdefault(id(request), (request, []))[1].append(rank)
    return list(groups.values())


_CHECKS: list[tuple[str, Callable[[Request], object], Callable[[Any], str]]] = [
    ("number of tensors", lambda request: len(request.shapes), lambda count: f"{count} tensor{'s' * (count != 1)}"),
    ("kind of device", lambda request: request.device.partition(":")[0], "device {}".format),
    ("reduction", lambda request: request.op, lambda op: f"op={op.title()}"),
    (
        "scales",
        # compared as text, so that 1 equals 1.0 and nan equals nan
        lambda request: f"prescale_factor={float(request.prescale)} and postscale_factor={float(request.postscale)}",
        str,
    ),
    ("root_rank", lambda request: request.root, "root_rank={}".format),
]


def _difference_fault(name: str, title: str, kind: str, groups: _Groups) -> str | None:
    operations = _difference(groups, lambda request: request.kind, str)
    if operations is not None:
        return f"{operations} for the name {name!r}; every rank must call the same operation under one name."
    for what, value, text in _CHECKS:
        difference = _difference(groups, value, text)
        if difference is not None:
            return f"{title}: {difference}; every rank must pass the same {what}."
    count = len(groups[0][0].shapes)
    for place in range(count):
        fault = _tensor_fault(kind, groups, place)
        if fault is not None:
            return f"{title}{f', tensor {place + 1} of {count}' if count > 1 else ''}: {fault}."
    return None


def _tensor_fault(kind: str, groups: _Groups, place: int) -> str | None:
    difference = _difference(groups, lambda request: request.dtypes[place], str)
    if difference is not None:
        return f"{difference}; every rank must pass the same dtype"
    if kind in ("allgather", "alltoall"):
        # A 0-dim tensor counts as one row.
        what, rest = "dimensions after the first", lambda request: ("*", *request.shapes[place][1:])
    else:
        what, rest = "shape", lambda request: tuple(request.shapes[place])
    difference = _difference(groups, rest, _shape)
    return None if difference is None else f"{difference}; every rank must pass the same {what}"


def _joined_fault(title: str, request: Request, joined: Sequence[int], horovod: bool) -> str | None:
    if not joined:
        return None
    if request.kind == "broadcast" and request.root in joined:
        return f"{title} cannot run: its root, rank {request.root}, has called join() and has nothing to send."
    unable = ("alltoall", "reducescatter", "allgather", "broadcast") if horovod else ("alltoall", "reducescatter")
    if request.kind in unable or request.op == "ADASUM":
        what = "Adasum" if request.op == "ADASUM" else request.kind
        return f"{title} cannot run: {ranks_text(joined)} called join(), and {what} needs a tensor of every rank."
    return None


def _difference(groups: _Groups, value: Callable[[Request], object], text: Callable[[Any], str]) -> str | None:
    """Say who passed what; None if all passed the same."""
    who: dict[object, list[int]] = {}
    for request, ranks in groups:
        who.setdefault(value(request), []).extend(ranks)
    if len(who) == 1:
        return None
    return ", ".join(shortened(f"{ranks_text(ranks)} passed {text(passed)}" for passed, ranks in who.items()))


def _shape(dims: Sequence[object]) -> str:
    return f"shape ({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"
