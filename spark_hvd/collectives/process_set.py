"""Process sets: groups of ranks with their own collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from spark_hvd.collectives.queue import NegotiatedQueue
from spark_hvd.world.errors import NotInitializedError
from spark_hvd.world.layout import World


class CurrentWorld(Protocol):
    """What process sets need to know of the world that this process is in; the context provides it."""

    @property
    def world(self) -> World:
        """This rank's view of the world."""

    @property
    def queue(self) -> NegotiatedQueue:
        """The queue of the collectives of all ranks."""

    @property
    def queues(self) -> Mapping[int, NegotiatedQueue]:
        """Queues of the process sets that include this rank, by number."""

    @property
    def process_sets(self) -> Mapping[int, ProcessSet]:
        """Registered process sets by number, without the global one."""


def _nowhere() -> CurrentWorld:
    raise NotInitializedError()


_current: Callable[[], CurrentWorld] = _nowhere


def look_up_with(current: Callable[[], CurrentWorld]) -> None:
    """Set the function that returns this process's world, or raises NotInitializedError; the context calls this."""
    global _current
    _current = current


def _world() -> World | None:
    try:
        return _current().world
    except NotInitializedError:
        return None


class ProcessSet:
    """Some ranks of the world, for the `process_set` argument of collectives and optimizers.

    Register it before use, by ``init(process_sets=[...])`` or :func:`add_process_set` on every rank of the world. It
    ends with the world in which it was registered.

    Args:
        ranks_or_comm: Ranks of the world, in any order.

    Raises:
        ValueError: The ranks are not distinct whole numbers.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable) or isinstance(ranks_or_comm, (str, bytes)):
            raise ValueError(f"a process set consists of ranks, such as ProcessSet([0, 2]); got {ranks_or_comm!r}.")
        ranks = list(ranks_or_comm)
        if not ranks or not all(isinstance(rank, int) and rank >= 0 for rank in ranks) or len(set(ranks)) < len(ranks):
            raise ValueError(f"a process set consists of distinct ranks, at least one; got {ranks}.")
        self._ranks = sorted(ranks)
        self._id: int | None = None

    @property
    def process_set_id(self) -> int | None:
        """The set's number, the same on all ranks; None while it is not registered."""
        return self._id

    @property
    def ranks(self) -> list[int] | None:
        """The set's ranks in the world, ascending."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Return the number of ranks; None while the set is not registered."""
        return None if self._id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's position in the set; None if it is not a member, or the set is not registered."""
        ranks, world = self.ranks, _world()
        if self.process_set_id is None or ranks is None or world is None:
            return None
        return ranks.index(world.me.rank) if world.me.rank in ranks else None

    def included(self) -> bool | None:
        """Return whether this rank is a member; None while the set is not registered."""
        return None if self.process_set_id is None else self.rank() is not None

    def registered_as(self, number: int | None) -> None:
        """Set or clear the number; for the context only."""
        self._id = number

    def require_root(self, root_rank: int) -> None:
        """Raise a ValueError unless a member has this rank in the world."""
        if root_rank not in (self.ranks or []):
            raise ValueError(f"root_rank={root_rank} is not a rank of {self}; pass the root's rank in the world.")

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        return self  # it stands for part of the one world; models that hold it are copied

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current world, whichever that is."""

    def __init__(self) -> None:
        self._id = 0

    @property
    def process_set_id(self) -> int | None:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        world = _world()
        return None if world is None else list(range(world.me.size))

    def size(self) -> int | None:
        return None if self.ranks is None else len(self.ranks)

    def included(self) -> bool | None:
        return None if _world() is None else True

    def require_root(self, root_rank: int) -> None:
        size = _current().world.me.size
        if root_rank not in range(size):
            raise ValueError(f"root_rank={root_rank} is not a rank of this world; expected 0 to {size - 1}.")


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks."""


def queue_of(process_set: ProcessSet) -> NegotiatedQueue:
    """Return the queue of a process set's collectives.

    Raises:
        NotInitializedError: Before init().
        ValueError: It is not registered, or this rank is not in it.
    """
    here = _current()
    if process_set is global_process_set:
        return here.queue
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is not a ProcessSet; register one with hvd.add_process_set().")
    number = process_set.process_set_id
    if number is None or here.process_sets.get(number) is not process_set:
        raise ValueError(f"{process_set} is not registered in this world; call hvd.add_process_set() on every rank.")
    queue = here.queues.get(number)
    if queue is None:
        raise ValueError(
            f"rank {here.world.me.rank} is not a member of {process_set}; only its members may call collectives on it."
        )
    return queue
