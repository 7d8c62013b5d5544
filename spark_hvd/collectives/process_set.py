"""Process sets: parts of the world whose ranks have collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from spark_hvd.collectives.members import open_members
from spark_hvd.context import init as context
from spark_hvd.transport.groups import let_end
from spark_hvd.transport.kv import PrefixStore
from spark_hvd.transport.nccl import NcclGroups
from spark_hvd.world.errors import MismatchError

if TYPE_CHECKING:
    from spark_hvd.collectives.lane import Lane


class ProcessSet:
    """Some ranks of the world, for the `process_set` argument of collectives and optimizers.

    It can be used once it is registered, by ``init(process_sets=[...])`` or :func:`add_process_set` on every rank of
    the world. It ends with the world it was registered in.

    Args:
        ranks_or_comm: The ranks, in the world; any order.

    Raises:
        ValueError: Not a collection of different whole numbers.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable) or isinstance(ranks_or_comm, (str, bytes)):
            raise ValueError(f"a process set is made of ranks, such as ProcessSet([0, 2]); got {ranks_or_comm!r}.")
        ranks = list(ranks_or_comm)
        if not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError(f"a process set is made of different ranks, at least one; got {ranks}.")
        self._ranks = sorted(ranks)
        self._id: int | None = None

    @property
    def process_set_id(self) -> int | None:
        """The same number on all ranks; None while it is not registered."""
        return self._id

    @property
    def ranks(self) -> list[int] | None:
        """Its ranks in the world, ascending."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Number of ranks; None while it is not registered."""
        return None if self._id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """My place in it; None if I am not in it or it is not registered."""
        ranks = self.ranks
        if self.process_set_id is None or ranks is None or not context.in_world():
            return None
        me = context.current().world.me.rank
        return ranks.index(me) if me in ranks else None

    def included(self) -> bool | None:
        """Whether I am in it; None while it is not registered."""
        return None if self.process_set_id is None else self.rank() is not None

    def registered_as(self, number: int | None) -> None:
        """Take a number, or lose it; for the context only."""
        self._id = number

    def require_root(self, root_rank: int) -> None:
        """Raise a ValueError unless this is the rank, in the world, of a member."""
        if root_rank not in (self.ranks or []):
            raise ValueError(f"root_rank={root_rank} is no rank of {self}; root ranks count in the world.")

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        return self  # it stands for a part of this world, of which there is one; models that hold it are copied

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks of the world, whichever world that is at the time."""

    def __init__(self) -> None:
        self._id = 0

    @property
    def process_set_id(self) -> int | None:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(context.current().world.me.size)) if context.in_world() else None

    def size(self) -> int | None:
        return None if self.ranks is None else len(self.ranks)

    def included(self) -> bool | None:
        return True if context.in_world() else None

    def require_root(self, root_rank: int) -> None:
        size = context.current().world.me.size
        if root_rank not in range(size):
            raise ValueError(f"root_rank={root_rank} is no rank of this world; expected 0 to {size - 1}.")


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; every rank of the world must, with the same ranks and in the same order.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set.

    Raises:
        NotInitializedError: Before init().
        ValueError: A rank is not in the world, or there is a set of these ranks already.
        MismatchError: Ranks add different sets. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    from spark_hvd.collectives.objects import allgather_object

    here = context.current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks
    assert ranks is not None
    for rank, theirs in enumerate(allgather_object(ranks, name="spark_hvd.add_process_set")):
        if theirs != ranks:
            raise MismatchError(
                f"add_process_set: rank {here.world.me.rank} adds the ranks {ranks}, rank {rank} adds {theirs}; every "
                "rank of the world must add the same sets in the same order, also those it is not in."
            )
    size = here.world.me.size
    if ranks[-1] >= size:
        raise ValueError(f"{added} has ranks that the world has not: expected 0 to {size - 1}.")
    twin = next((other for other in [global_process_set, *here.process_sets.values()] if other.ranks == ranks), None)
    if twin is not None:
        raise ValueError(f"{twin} has the ranks {ranks} already; use that one, or remove it first.")
    _open(added, ranks)
    return added


def register_all(process_sets: Sequence[ProcessSet] | str) -> None:
    """Register process sets that are not yet; every rank of the world must, the same ones.

    Raises:
        ValueError: It is no list of process sets, or one cannot be made.
        MismatchError: Ranks register different sets. Raised on every rank.
    """
    if isinstance(process_sets, str):
        raise ValueError(f'process_sets={process_sets!r}: expected a list of ProcessSet, or "dynamic".')
    for number, each in enumerate(process_sets):
        if not isinstance(each, ProcessSet):
            raise ValueError(f"process_sets[{number}] is {each!r}; expected a ProcessSet.")
        if context.current().process_sets.get(each.process_set_id or 0) is not each:
            try:
                add_process_set(each)
            except ValueError as error:
                raise type(error)(f"process_sets[{number}]: {error}") from error


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set; every rank of the world must, in the same order. What is under way in it fails.

    Returns:
        False for the global process set and for one that is not registered: nothing happens then.

    Raises:
        NotInitializedError: Before init().
        MismatchError: Ranks remove different sets. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    from spark_hvd.collectives.objects import allgather_object

    here = context.current()
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
    """Open the lane of a process set that all ranks have agreed on; every rank of the world must call this."""
    here = context.current()
    number = next(here.numbers)
    me, groups = here.world.me.rank, here.groups
    if me in ranks:
        with here.making():
            nccl = NcclGroups(lambda: groups.of(number))
            members = open_members(number, ranks, here.layout, me, groups, here.engine.config, nccl)
            here.lanes[number] = here.engine.open_lane(members, PrefixStore(f"lane/{number}", here.kv))
    here.process_sets[number] = process_set
    process_set.registered_as(number)


def _close(process_set: ProcessSet) -> None:
    """Close the lane of a process set; every rank of the world must call this."""
    here = context.current()
    number = process_set.process_set_id
    assert number is not None
    lane = here.lanes.pop(number, None)
    if lane is not None:
        here.engine.close_lane(lane, f"{process_set} was removed.")
        let_end([lane])
        here.groups.destroy(number)
    del here.process_sets[number]
    process_set.registered_as(None)


def lane_of(process_set: ProcessSet) -> Lane:
    """The named lane of a process set.

    Raises:
        NotInitializedError: Before init().
        ValueError: It is not registered, or this rank is not in it.
    """
    here = context.current()
    if process_set is global_process_set:
        return here.lane
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is no ProcessSet; register one with hvd.add_process_set().")
    number = process_set.process_set_id
    if number is None or here.process_sets.get(number) is not process_set:
        raise ValueError(f"{process_set} is not registered in this world; call hvd.add_process_set() on every rank.")
    lane = here.lanes.get(number)
    if lane is None:
        raise ValueError(
            f"rank {here.world.me.rank} is not a member of {process_set}; only its members may call collectives on it."
        )
    return lane
