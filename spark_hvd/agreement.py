"""Whether the ranks' requests for one name fit together; if not, one sentence that names the ranks and both values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spark_hvd.request import Request

_SHOWN = 16
"""Ranks or shapes spelled out in a message before it becomes unreadable."""


def disagreement(name: str, requests: Mapping[int, Request], joined: Sequence[int] = ()) -> str | None:
    """What is wrong with a collective.

    Args:
        name: Its name.
        requests: The request of each rank, by its number in the world; those of joined ranks are missing.
        joined: The ranks that have joined.

    Returns:
        None if it can run.
    """
    first = next(iter(requests.values()))
    title = f"{first.kind} {name!r}"
    for rank, request in requests.items():
        if request.fault is not None:
            return f"{title} cannot run: on rank {rank} {request.fault}."
    operations = _difference(requests, lambda request: request.kind)
    if operations is not None:
        return f"{operations} for the name {name!r}; every rank must call the same operation under one name."
    for what, value in _CHECKS:
        difference = _difference(requests, value)
        if difference is not None:
            return f"{title}: {difference}; every rank must pass the same {what}."
    return _shape_fault(title, first.kind, requests) or _joined_fault(title, first, joined)


_CHECKS: list[tuple[str, Callable[[Request], Any]]] = [
    ("number of tensors", lambda request: f"{len(request.shapes)} tensors"),
    ("dtype", lambda request: ", ".join(_shortened(request.dtypes))),
    ("kind of device", lambda request: f"device {request.device}"),
    ("reduction", lambda request: None if request.op is None else f"op={request.op.title()}"),
    (
        "scales",
        lambda request: f"prescale_factor={request.prescale} and postscale_factor={request.postscale}",
    ),
    ("root_rank", lambda request: f"root_rank={request.root}"),
]


def _shape_fault(title: str, kind: str, requests: Mapping[int, Request]) -> str | None:
    if kind in ("allgather", "alltoall"):
        what, value = "dimensions after the first", _without_rows
    else:
        what, value = "shape", _shapes
    difference = _difference(requests, value)
    return None if difference is None else f"{title}: {difference}; every rank must pass the same {what}."


def _joined_fault(title: str, request: Request, joined: Sequence[int]) -> str | None:
    if not joined:
        return None
    if request.kind == "broadcast" and request.root in joined:
        return f"{title} cannot run: its root, rank {request.root}, has called join() and has nothing to send."
    if request.kind in ("alltoall", "reducescatter") or request.op == "ADASUM":
        what = "Adasum" if request.op == "ADASUM" else request.kind
        return f"{title} cannot run: {ranks_text(joined)} called join(), and {what} needs a tensor of every rank."
    return None


def _difference(requests: Mapping[int, Request], value: Callable[[Request], Any]) -> str | None:
    """Who passed what, unless all passed the same."""
    who: dict[Any, list[int]] = {}
    for rank, request in requests.items():
        who.setdefault(value(request), []).append(rank)
    if len(who) == 1:
        return None
    return ", ".join(f"{ranks_text(sorted(ranks))} passed {text}" for text, ranks in who.items())


def _shapes(request: Request) -> str:
    return "shape " + ", ".join(_shortened(_tuple(shape) for shape in request.shapes))


def _without_rows(request: Request) -> str:
    # A 0-dim tensor counts as one row.
    return "shape " + ", ".join(_shortened(_tuple(["*", *shape[1:]]) for shape in request.shapes))


def _tuple(dims: Sequence[object]) -> str:
    return f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"


def _shortened(items: Iterable[str]) -> list[str]:
    listed = list(items)
    return listed if len(listed) <= _SHOWN else [*listed[:_SHOWN], f"and {len(listed) - _SHOWN} more"]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [str(rank) for rank in run] if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(_shortened(parts))}"
