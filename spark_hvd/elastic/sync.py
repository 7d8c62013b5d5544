"""Gives all ranks the state of the rank with the latest commit: first its skeletons, then its tensors in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.context import global_state
from spark_hvd.elastic.skeleton import Receivers, TensorTable, broadcast_all, unflatten
from spark_hvd.transport.communicator import Communicator
from spark_hvd.world.errors import MismatchError


def synchronize(
    communicator: Communicator,
    content: Mapping[str, Any],
    kinds: Mapping[str, str],
    commits: int,
    misfit: Callable[[str, Any], str | None],
) -> tuple[Mapping[str, Any], int, int]:
    """Give every rank the content of the lowest of those ranks that have the most commits; collective.

    Three small exchanges come first, and then the tensors in batches of bounded size. They are received into the
    tensors of `content` if dtype and shape fit, so that no second copy of a model is needed.

    Args:
        communicator: The communicator of all ranks.
        content: This rank's values, by name. The root's are not changed.
        kinds: The kind of each value, which must be equal on all ranks.
        commits: This rank's number of commits.
        misfit: Function from a name and the root's skeleton to the reason why this rank cannot load the value, or None.

    Returns:
        The root's content, its number of commits, and its rank. Tensors may be those of this rank's own content.

    Raises:
        MismatchError: Ranks have different names or kinds, are in different elastic functions, or one could not load
            the root's. Raised on every rank; nothing has changed.
        ValueError: The root has something that cannot be sent. Raised on every rank; nothing has changed.
        CollectiveError: A peer or the network failed. This rank's content may be overwritten in part, if not the root.
    """
    facts = allgather_object((commits, global_state.global_state.functions, dict(kinds)))
    counts, functions, all_kinds = map(list, zip(*facts, strict=True))
    _require_same_function(functions)
    _require_same_kinds(all_kinds)
    root = counts.index(max(counts))

    def require_fits(skeletons: Mapping[str, Any]) -> None:
        faults = [misfit(name, skeleton) for name, skeleton in skeletons.items()] if communicator.rank != root else []
        for rank, text in enumerate(allgather_object("; ".join(filter(None, faults)))):
            if text:
                raise MismatchError(
                    f"state.sync(): rank {rank} cannot load the state of rank {root}: {text}. Build models, optimizers "
                    "and the like in the same way on every rank."
                )

    return broadcast_content(communicator, content, root, "state.sync()", require_fits), counts[root], root


def broadcast_content(
    communicator: Communicator,
    content: Mapping[str, Any],
    root: int,
    caller: str,
    check: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Mapping[str, Any]:
    """Return one rank's named values on all ranks. The root keeps its own; the others receive tensors in place.

    ``caller`` is the function that the user called, for errors. ``check`` is called with the root's skeletons before
    any tensor is sent.

    Raises:
        ValueError: The root has a value that cannot be sent. Raised on every rank.
    """
    table = TensorTable()
    skeletons: dict[str, Any] = {}
    fault: str | None = None
    if communicator.rank == root:
        try:
            skeletons = flatten_all(table, content)
        except TypeError as error:
            fault = str(error)
    skeletons, fault = broadcast_object((skeletons, fault), root)
    if fault is not None:
        raise ValueError(f"{caller}: rank {root} has state that cannot be sent: {fault}")
    check(skeletons)
    if communicator.rank == root:
        broadcast_all(communicator, table.tensors, root)
        return content
    receivers = Receivers()
    for name, skeleton in skeletons.items():
        receivers.prepare(skeleton, content[name])
    broadcast_all(communicator, receivers.in_order(), root)
    received: Mapping[str, Any] = unflatten(skeletons, lambda ref: receivers.tensors[ref.number])
    return received


def flatten_all(table: TensorTable, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the skeletons of named values.

    Raises:
        TypeError: A value has a tensor that cannot be copied. The message names the value.
    """
    skeletons: dict[str, Any] = {}
    for name, value in content.items():
        try:
            skeletons[name] = table.flatten(value)
        except TypeError as error:
            raise TypeError(f"{name!r}: {error}") from error
    return skeletons


def _require_same_function(numbers: list[int]) -> None:
    first, last = min(numbers), max(numbers)
    if first != last:
        raise MismatchError(
            f"state.sync(): rank {numbers.index(first)} is in elastic function number {first} of fn, and rank "
            f"{numbers.index(last)} in number {last}: a new rank runs fn from its start. Train in one elastic "
            "function, and keep the progress in its state, so that new ranks continue from there."
        )


def _require_same_kinds(gathered: list[dict[str, str]]) -> None:
    first = gathered[0]
    for rank, theirs in enumerate(gathered):
        for name in sorted(first.keys() | theirs.keys()):
            if first.get(name) != theirs.get(name):
                raise MismatchError(
                    f"state.sync(): {name!r} is {first.get(name, 'missing')} on rank 0, but "
                    f"{theirs.get(name, 'missing')} on rank {rank}. Make the state from the same values on every rank."
                )
