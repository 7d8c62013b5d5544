"""The world that this process has joined: init, join, shutdown, and the one current Context."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_hvd import mpi_backend
from spark_hvd.channel import own_address
from spark_hvd.communicator import Communicator
from spark_hvd.config import Config
from spark_hvd.engine import Engine
from spark_hvd.errors import NotInitializedError
from spark_hvd.groups import Groups, let_end
from spark_hvd.kv import HashStore, PrefixStore, Store
from spark_hvd.lane import Lane
from spark_hvd.launch_env import read_config, read_launch_env, read_mpi_env
from spark_hvd.layout import RankInfo, WorldLayout, ranks_in
from spark_hvd.local import LocalCommunicator
from spark_hvd.members import communicator_over, open_members
from spark_hvd.mpi_world import abort_on_exceptions, is_mpi_communicator, part_of, ranks_of, world_of
from spark_hvd.nccl import NcclGroups
from spark_hvd.rendezvous import adopted_world, everyones, launched_world, meeting
from spark_hvd.world import World

if TYPE_CHECKING:
    from spark_hvd.mpi_library import MPI
    from spark_hvd.process_sets import ProcessSet

DEFAULT_TIMEOUT = 1800.0
"""Seconds until a collective gives up on its peers, as in torch.distributed."""


@dataclass(frozen=True, slots=True)
class Context:
    """What this process knows of the world it is in."""

    world: World
    layout: WorldLayout
    communicator: Communicator
    kv: Store
    """The ranks' key-value store, with a prefix of this world's own."""
    owns_default_group: bool
    """False if the user had initialised torch.distributed; it is then left alone."""
    engine: Engine
    lane: Lane
    """The named lane of all ranks."""
    groups: Groups
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    """Those registered, the global one aside, by number."""
    lanes: dict[int, Lane] = field(default_factory=dict)
    """Of the process sets that this rank is in, by number."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """For process sets; none is used twice, as keys of the key-value store must not be."""

    def new_group(self, process_set_id: int, gloo_threads: int | None = None) -> dist.ProcessGroup:
        """A process group of the ranks of a process set; each of them must call this, in the same order.

        Args:
            process_set_id: 0 for all ranks.
            gloo_threads: None for the world's backends; else Gloo alone, with this number of threads.
        """
        lane = self.lanes[process_set_id] if process_set_id else self.lane
        return self.groups.make(process_set_id, lane.ranks, gloo_threads)


@dataclass(frozen=True, slots=True)
class _Joined:
    """How the world was joined, so that init() after shutdown() finds it again."""

    world: World
    kv: Store
    timeout: float
    backend: str | None
    times: int
    """How often this generation was joined over this store: every time gets keys of its own."""


_lock = threading.RLock()
_current: Context | None = None
_joined: _Joined | None = None
_adoptions = 0
_started_by_mpi = False


def current() -> Context:
    """The world this process is in.

    Raises:
        NotInitializedError: init() has not been called, or shutdown() has.
    """
    context = _current
    if context is None:
        raise NotInitializedError()
    return context


def is_initialized() -> bool:
    """Whether this process is in a world."""
    return _current is not None


def init(
    comm: Sequence[int] | MPI.Intracomm | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    **settings: Any,
) -> None:
    """Join the world that the launcher made; does nothing if that has happened already and nothing is asked for.

    In order: the world this process was in before :func:`shutdown`; a default process group that the user initialised
    with torch.distributed, which is used and never destroyed; the world that torchrun's variables describe; over MPI,
    the one that mpiexec started; a world of one. torch's default process group is left initialised, for DDP, FSDP2 and
    other users of torch.distributed.

    Args:
        comm: Ranks of the launcher's world that make a world of their own, in which they are renumbered from 0 in
            ascending order; each of them must pass the same list. Or a communicator of mpi4py: the world is then made
            by MPI out of its ranks, with their numbers there; each of them must pass it. None: all ranks.
        process_sets: Process sets to register, the same on every rank, see
            :func:`spark_hvd.process_sets.add_process_set`. Horovod's "dynamic" is understood, and needed no more.
        **settings: Values that tune the named lane, see :class:`spark_hvd.config.Config`. Rank 0's count for all. They
            can be given in a world that was joined already, too. They come before the environment's, HOROVOD_*.

    Raises:
        ValueError: A setting is wrong, `comm` is no list of ranks with this one in it, a process set cannot be made,
            or the launcher's environment variables are incomplete.
        ImportError: An MPI process manager started this process, but there is no mpi4py.
        TypeError: There is no such setting.
        MismatchError: Ranks pass different process sets.
        CollectiveError: The other ranks could not be reached.
    """
    with _lock:
        config = replace(read_config(), **settings)
        starts_timeline = _current is not None and "timeline" in settings
        if _current is None:
            _join_as_launched(comm, config)
        elif settings:
            if settings.get("stall_timeout", 0.0) is None:
                settings["stall_timeout"] = _current.groups.timeout
            _current.engine.tune(replace(_current.engine.config, **settings))
        if comm is not None:
            _join_part(comm, config)
        if _started_by_mpi:
            abort_on_exceptions()  # no launcher of ours looks after the ranks
    if process_sets is not None and process_sets != "dynamic":
        from spark_hvd.process_sets import register_all

        register_all(process_sets)
    if starts_timeline and comm is None and config.timeline is not None:
        start_timeline(config.timeline, config.timeline_mark_cycles)


def _join_as_launched(comm: Sequence[int] | MPI.Intracomm | None, config: Config) -> None:
    if dist.is_initialized():
        _adopt_default_group(config)
    elif is_mpi_communicator(comm):
        _join_mpi(comm, config)
    elif _joined is not None:
        join(_joined.world, _joined.kv, timeout=_joined.timeout, backend=_joined.backend, config=config)
    elif (env := read_launch_env()) is not None:
        join(*launched_world(env), config=config)
    elif (started := read_mpi_env()) is not None:
        _join_mpi(None, config, started.master)
    else:
        _join_nobody(config)


def _join_mpi(comm: MPI.Intracomm | None, config: Config, master: str | None = None) -> None:
    global _started_by_mpi
    join(*world_of(comm, master), backend="mpi", config=config)
    _started_by_mpi = True


def _join_part(comm: Sequence[int] | MPI.Intracomm, config: Config) -> None:
    """Leave the world for one of some of its ranks, unless those are all."""
    here = current()
    me, size = here.world.me.rank, here.world.me.size
    ranks = ranks_of(comm, here.world.mpi, size) if is_mpi_communicator(comm) else ranks_in(comm, size)
    if ranks == list(range(size)):
        return
    if me not in ranks:
        raise ValueError(f"comm={comm!r} does not have this rank, {me}; each rank passes the world that it is in.")
    if _joined is None or not here.owns_default_group:
        raise ValueError(
            f"comm={comm!r}: torch.distributed was initialised before spark_hvd, so its world cannot be divided; "
            "register a process set instead."
        )
    layout = WorldLayout.of_ranks([here.layout.ranks[rank].host for rank in ranks])
    mpi = part_of(here.world.mpi, ranks) if _joined.backend == "mpi" else None
    world = replace(here.world, me=layout.ranks[ranks.index(me)], mpi=mpi)
    kv = PrefixStore(f"part/{'-'.join(map(str, ranks))}", _joined.kv)
    timeout, backend = _joined.timeout, _joined.backend
    shutdown()
    join(world, kv, timeout=timeout, backend=backend, config=config)


def join(
    world: World,
    kv: Store,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    backend: str | None = None,
    config: Config | None = None,
) -> None:
    """Join a world; launchers call it in the rank's process before the user's code, for which init() is then a no-op.

    Args:
        world: Who I am.
        kv: A store that all ranks reach. One of the ranks or the launcher must keep it served.
        timeout: Seconds until a collective gives up on its peers.
        backend: "gloo", "nccl" or "mpi" for every tensor; None for NCCL on CUDA tensors and gloo on CPU tensors. For
            "mpi" the process must have been started by an MPI process manager that numbers the ranks alike.
        config: Values that tune the named lane; None: the environment's.

    Raises:
        RuntimeError: This process is in a world already, or MPI numbers the ranks in another way.
        ImportError: `backend` is "mpi", but there is no mpi4py.
        CollectiveError: The other ranks could not be reached.
    """
    global _joined
    with _lock:
        if _current is not None:
            raise RuntimeError(
                f"this process is rank {_current.world.me.rank} of a world already; "
                "call hvd.shutdown() before it joins another."
            )
        times = 0
        if _joined is not None and _joined.kv is kv and _joined.world.generation == world.generation:
            times = _joined.times + 1
        _joined = _Joined(world, kv, timeout, backend, times)
        prefixed = PrefixStore(f"spark_hvd/{world.generation}/{times}", kv)
        infos = everyones(asdict(world.me), prefixed, world.me.rank, world.me.size)
        layout = WorldLayout(tuple(RankInfo(**info) for info in infos), tuple(range(world.me.size)))
        _enter(world, layout, prefixed, timeout, backend, config or read_config())


def _join_nobody(config: Config) -> None:
    layout = WorldLayout.of_ranks(["localhost"])
    _enter(World(layout.ranks[0], None), layout, HashStore(), DEFAULT_TIMEOUT, None, config)


def _adopt_default_group(config: Config) -> None:
    global _adoptions
    world, layout, kv = adopted_world(f"spark_hvd/adopted/{_adoptions}")
    _adoptions += 1
    _settle(world, layout, kv, DEFAULT_TIMEOUT, config, owns_default_group=False)


def _enter(world: World, layout: WorldLayout, kv: Store, timeout: float, backend: str | None, config: Config) -> None:
    if backend == "mpi":
        mpi_backend.use(world.mpi, world.me.rank, world.me.size)
        backend = mpi_backend.NAME
    elif backend is None:
        # Plain "gloo" where there is no GPU: with "cpu:gloo" torch warns of its own plugins at every group.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    with meeting(world.me.rank, world.me.size):
        dist.init_process_group(
            backend,
            store=PrefixStore("default_group", kv),
            rank=world.me.rank,
            world_size=world.me.size,
            timeout=timedelta(seconds=timeout),
        )
    try:
        _settle(world, layout, kv, timeout, config, owns_default_group=True)
    except BaseException:
        dist.destroy_process_group()
        raise


def _settle(
    world: World, layout: WorldLayout, kv: Store, timeout: float, config: Config, *, owns_default_group: bool
) -> None:
    """Open the named lane over the default process group's ranks; the world is then joined."""
    global _current
    if config.stall_timeout is None:
        config = replace(config, stall_timeout=timeout)
    engine = Engine(config, world.secret, lambda: own_address(world.endpoint), world.ports)
    size = world.me.size
    groups = Groups(kv, timeout, owns_default_group=owns_default_group)
    try:
        communicator: Communicator = LocalCommunicator() if size == 1 else communicator_over(None)
        # A default group that the user initialised is his own affair, also when it hangs. Ours is looked up, not kept:
        # its connections close with the last reference to it, which is how peers notice that it was destroyed.
        nccl = NcclGroups(lambda: [dist.group.WORLD if owns_default_group else None, *groups.of(0)])
        members = open_members(0, range(size), layout, world.me.rank, groups, config, nccl)
        lane = engine.open_lane(members, PrefixStore("lane/0", kv))
    except BaseException:
        engine.close("init() failed")
        raise
    _current = Context(world, layout, communicator, kv, owns_default_group, engine, lane, groups)
    if config.timeline is not None:
        try:
            start_timeline(config.timeline, config.timeline_mark_cycles)
        except OSError:
            _current = None
            engine.close("init() failed")
            raise


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what all ranks do from now on, as a Chrome trace; see docs/timeline.md.

    To be called on rank 0 at least; on other ranks it does nothing.

    Args:
        file_path: The file to write, on rank 0's host.
        mark_cycles: Whether to mark when the engine wakes up.

    Raises:
        NotInitializedError: Before init().
        ValueError: A timeline is being recorded already.
        OSError: The file cannot be written.
    """
    here = current()
    if here.world.me.rank == 0:
        here.engine.start_timeline(file_path, mark_cycles, [info.host for info in here.layout.ranks])


def stop_timeline() -> None:
    """Stop recording, gather the events of all ranks, and complete the file; does nothing if none is recorded.

    Raises:
        NotInitializedError: Before init().
        OSError: The file could not be written.
    """
    here = current()
    if here.world.me.rank == 0:
        here.engine.stop_timeline()


def register(process_set: ProcessSet, ranks: Sequence[int]) -> None:
    """Open the lane of a process set that all ranks have agreed on; every rank of the world must call this."""
    here = current()
    number = next(here.numbers)
    me = here.world.me.rank
    if me in ranks:
        groups = here.groups
        nccl = NcclGroups(lambda: groups.of(number))
        members = open_members(number, ranks, here.layout, me, here.groups, here.engine.config, nccl)
        here.lanes[number] = here.engine.open_lane(members, PrefixStore(f"lane/{number}", here.kv))
    here.process_sets[number] = process_set
    process_set.registered_as(number)


def unregister(process_set: ProcessSet) -> None:
    """Close the lane of a process set; every rank of the world must call this."""
    here = current()
    number = process_set.process_set_id
    assert number is not None
    lane = here.lanes.pop(number, None)
    if lane is not None:
        here.engine.close_lane(lane, f"{process_set} was removed.")
        let_end([lane])
        here.groups.destroy(number)
    del here.process_sets[number]
    process_set.registered_as(None)


def shutdown() -> None:
    """Leave the world; does nothing outside one. init() may follow, if it follows on every rank.

    What is still under way fails, here and on the other ranks. A default process group that the user initialised
    himself stays. Called when the interpreter exits.
    """
    global _current
    with _lock:
        context, _current = _current, None
        if context is None:
            return
        for process_set in context.process_sets.values():
            process_set.registered_as(None)
        context.engine.close("hvd.shutdown() was called on this rank.")
        let_end([context.lane, *context.lanes.values()])
        context.communicator.close()
        # The user may have destroyed the default group himself, and all others with it.
        if dist.is_initialized():
            if context.owns_default_group:
                dist.destroy_process_group()
                context.groups.forget()
                mpi_backend.release()
            else:
                context.groups.destroy_all()


def _leave() -> None:
    shutdown()
    library = sys.modules.get("spark_hvd.mpi_library")
    if library is not None:
        library.finalize()


mpi_backend.register()
atexit.register(_leave)
