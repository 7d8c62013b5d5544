"""Registers process sets in the world, and removes them; collective."""

from __future__ import annotations

from collections.abc import Sequence

from spark_hvd.collectives.members import open_members
from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.global_state import current
from spark_hvd.context.leave import drain
from spark_hvd.transport.nccl import NcclGroups
from spark_hvd.transport.torch_private import PrefixStore
from spark_hvd.world.errors import MismatchError


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Every rank of the world must register the same sets in the same order.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set.

    Raises:
        NotInitializedError: Before init().
        ValueError: A rank is not in the world, or a set of these ranks already exists.
        MismatchError: Ranks add different sets. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    here = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks
    assert ranks is not None
    for rank, theirs in enumerate(allgather_object(ranks, name="spark_hvd.add_process_set")):
        if theirs != ranks:
            raise MismatchError(
                f"add_process_set: rank {here.world.me.rank} adds the ranks {ranks}, rank {rank} adds {theirs}; every "
                "rank of the world must add the same sets in the same order, including sets without it."
            )
    size = here.world.me.size
    if ranks[-1] >= size:
        raise ValueError(f"{added} has ranks that the world does not have: expected 0 to {size - 1}.")
    same = next((other for other in [global_process_set, *here.process_sets.values()] if other.ranks == ranks), None)
    if same is not None:
        raise ValueError(f"{same} already has the ranks {ranks}; use that one, or remove it first.")
    _open(added, ranks)
    return added


def register_all(process_sets: Sequence[ProcessSet] | str) -> None:
    """Register process sets that are not yet registered. Every rank of the world must register the same ones.

    Raises:
        ValueError: ``process_sets`` is not a list of process sets, or one of them cannot be registered.
        MismatchError: Ranks register different sets. Raised on every rank.
    """
    if isinstance(process_sets, str):
        raise ValueError(f'process_sets={process_sets!r}: expected a list of ProcessSet, or "dynamic".')
    for number, each in enumerate(process_sets):
        if not isinstance(each, ProcessSet):
            raise ValueError(f"process_sets[{number}] is {each!r}; expected a ProcessSet.")
        if current().process_sets.get(each.process_set_id or 0) is not each:
            try:
                add_process_set(each)
            except ValueError as error:
                raise type(error)(f"process_sets[{number}]: {error}") from error


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank of the world must remove the same sets in the same order.

    Collectives in flight in the set fail.

    Returns:
        False, without any effect, for the global process set and for one that is not registered; otherwise True.

    Raises:
        NotInitializedError: Before init().
        MismatchError: Ranks remove different sets. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    here = current()
    number = process_set.process_set_id
    if number is None or here.process_sets.get(number) is not process_set:
        return False
    for rank, theirs in enumerate(allgather_object(number, name="spark_hvd.remove_process_set")):
        if theirs != number:
            raise MismatchError(
                f"remove_process_set: rank {here.world.me.rank} removes the set number {number}, rank {rank} number "
                f"{theirs}; every rank of the world must remove the same sets in the same order."
            )
    _close(process_set)
    return True


def _open(process_set: ProcessSet, ranks: Sequence[int]) -> None:
    """Open the queue of a process set. Every rank of the world must call this with the same set."""
    here = current()
    number = next(here.numbers)
    me, groups = here.world.me.rank, here.groups
    if me in ranks:
        with here.establishing():
            nccl = NcclGroups(lambda: groups.of(number))
            members = open_members(number, ranks, here.layout, me, groups, here.engine.config, nccl)
            here.queues[number] = here.engine.open_queue(members, PrefixStore(f"queue/{number}", here.kv))
    here.process_sets[number] = process_set
    process_set.registered_as(number)


def _close(process_set: ProcessSet) -> None:
    """Close the queue of a process set. Every rank of the world must call this."""
    here = current()
    number = process_set.process_set_id
    assert number is not None
    queue = here.queues.pop(number, None)
    if queue is not None:
        here.engine.close_queue(queue, f"{process_set} was removed.")
        drain([queue])
        here.groups.destroy(number)
    del here.process_sets[number]
    process_set.registered_as(None)
