"""The world that this process has joined: init, join, shutdown, and the one current Context.

An elastic rank goes from world to world. Between two of them, and before the first, it has a provisional place: it
can be asked who it is, but there is nobody to talk to.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_hvd import elastic_launcher, mpi_backend
from spark_hvd.channel import own_address
from spark_hvd.communicator import Communicator
from spark_hvd.config import Config
from spark_hvd.connections import Connections, sockets
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
from spark_hvd.wires import Wires
from spark_hvd.world import World

if TYPE_CHECKING:
    from spark_hvd.mpi_library import MPI
    from spark_hvd.process_sets import ProcessSet

_NO_GENERATION = (
    "this elastic rank is in no world at the moment, so there is nobody to talk to: collectives belong inside the "
    "function that is decorated with hvd.elastic.run."
)

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
    wires: Wires | None = None
    """Of an elastic world."""

    def making(self) -> contextlib.AbstractContextManager[None]:
        """To make process groups and lanes in, so that :func:`abort` ends that too."""
        return contextlib.nullcontext() if self.wires is None else self.wires.making()

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


@dataclass(frozen=True, slots=True)
class _Provisional:
    """What an elastic rank is outside its worlds."""

    me: RankInfo
    config: Config | None
    generation: int


_lock = threading.RLock()
_current: Context | None = None
_provisional: _Provisional | None = None
_wires: Wires | None = None
"""Of the elastic world that is joined, or is being joined."""
_aborted: tuple[int, str] | None = None
"""The last generation that was aborted by its number, and why."""
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
        raise NotInitializedError() if _provisional is None else NotInitializedError(_NO_GENERATION)
    return context


def place() -> RankInfo:
    """Who I am: in the world, or, as an elastic rank outside one, provisionally.

    Raises:
        NotInitializedError: Neither.
    """
    return _provisional.me if _current is None and _provisional is not None else current().world.me


def generation() -> int:
    """The number of the world; outside one, as an elastic rank, that of the last.

    Raises:
        NotInitializedError: Before init().
    """
    return _provisional.generation if _current is None and _provisional is not None else current().world.generation


def is_initialized() -> bool:
    """Whether this process is in a world, or waits for its first or next one as an elastic rank."""
    return _current is not None or _provisional is not None


def in_world() -> bool:
    """Whether this process is in a world, so that collectives work."""
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
        if _provisional is not None:
            _prepare(comm, process_sets, settings)
            return
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


def _prepare(comm: object, process_sets: object, settings: dict[str, Any]) -> None:
    """init() of an elastic rank outside its worlds: what was set counts in those to come."""
    global _provisional
    assert _provisional is not None
    if comm is not None:
        raise ValueError(f"comm={comm!r}: an elastic world cannot be divided; register process sets instead.")
    if process_sets and process_sets != "dynamic":
        raise ValueError(
            f"process_sets={process_sets!r}: process sets end with the world, and an elastic rank goes from world to "
            "world; register them by hvd.add_process_set() inside the function that is decorated with hvd.elastic.run."
        )
    if settings:
        _provisional = replace(_provisional, config=replace(_provisional.config or read_config(), **settings))


def expect(me: RankInfo) -> None:
    """Take a provisional place in worlds to come; the launchers of elastic ranks call it before the user's code.

    init() then does nothing, who-am-I questions are answered from it, and collectives raise NotInitializedError.
    :func:`join` replaces it by a world, :func:`abandon` brings one back.

    Args:
        me: Who I am for the time being.
    """
    global _provisional
    with _lock:
        assert _current is None, "a rank that is in a world has its place there"
        config, number = (_provisional.config, _provisional.generation) if _provisional is not None else (None, 0)
        _provisional = _Provisional(me, config, number)


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
        CollectiveError: The other ranks could not be reached, or :func:`abort` was called for this generation.
    """
    global _joined, _provisional
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
        config = config or (_provisional and _provisional.config) or read_config()
        if elastic_launcher.installed() is None:
            _meet(world, prefixed, timeout, backend, config)
        else:
            _meet_elastically(world, prefixed, timeout, backend, config)
        _provisional = None


def _meet(world: World, kv: Store, timeout: float, backend: str | None, config: Config) -> None:
    infos = everyones(asdict(world.me), kv, world.me.rank, world.me.size)
    layout = WorldLayout(tuple(RankInfo(**info) for info in infos), tuple(range(world.me.size)))
    _enter(world, layout, kv, timeout, backend, config)


def _meet_elastically(world: World, kv: Store, timeout: float, backend: str | None, config: Config) -> None:
    """Join a world that :func:`abort` can end, also before all have joined."""
    global _joined, _wires
    _wires = wires = Wires(world)
    if _aborted is not None and world.generation <= _aborted[0]:
        wires.cut(_aborted[1])
    try:
        with wires.making():
            _meet(world, kv, timeout, backend, config)
    except BaseException:
        # It may have been joined in the very moment in which it was aborted.
        _end("this rank gave up the generation.")
        _joined = _wires = None
        raise


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
    before = sockets()
    with meeting(world.me.rank, world.me.size):
        dist.init_process_group(
            backend,
            store=PrefixStore("default_group", kv),
            rank=world.me.rank,
            world_size=world.me.size,
            timeout=timedelta(seconds=timeout),
        )
    try:
        if _wires is not None:
            _wires.add(Connections.since(before, dist.distributed_c10d._get_default_group()))
        _settle(world, layout, kv, timeout, config, owns_default_group=True)
    except BaseException as error:
        if _wires is not None:
            _wires.cut(str(error))  # what is under way would be waited for
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
    groups = Groups(kv, timeout, owns_default_group=owns_default_group, wires=_wires)
    try:
        if _wires is not None:
            _wires.on_cut(engine.abort)
        communicator: Communicator = LocalCommunicator() if size == 1 else communicator_over(None)
        # A default group that the user initialised is his own affair, also when it hangs. Ours is looked up, not kept:
        # its connections close with the last reference to it, which is how peers notice that it was destroyed.
        nccl = NcclGroups(lambda: [dist.group.WORLD if owns_default_group else None, *groups.of(0)])
        members = open_members(0, range(size), layout, world.me.rank, groups, config, nccl)
        lane = engine.open_lane(members, PrefixStore("lane/0", kv))
    except BaseException:
        engine.close("init() failed")
        raise
    _current = Context(world, layout, communicator, kv, owns_default_group, engine, lane, groups, wires=_wires)
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


def shutdown() -> None:
    """Leave the world; does nothing outside one. init() may follow, if it follows on every rank.

    What is still under way fails, here and on the other ranks. A default process group that the user initialised
    himself stays. Called when the interpreter exits.
    """
    with _lock:
        _end("hvd.shutdown() was called on this rank.")


def abort(text: str, generation: int | None = None) -> None:
    """End the connections of an elastic world at once; what the training thread waits for fails. From any thread.

    :func:`join`, too, then ends with a CollectiveError soon.

    Args:
        text: Why, for the errors that follow.
        generation: Whose world it is about. Nothing happens to a later one, and an earlier or equal one cannot be
            joined any more: so no call is lost that comes a moment before :func:`join`. None: the one that is joined
            or is being joined, if any.
    """
    global _aborted
    if generation is not None and (_aborted is None or generation >= _aborted[0]):
        _aborted = generation, text
    wires = _wires
    if wires is None or (generation is not None and wires.generation > generation):
        return
    wires.cut(text)
    context = _current
    if context is not None:
        for lane in [context.lane, *context.lanes.values()]:
            if lane.members.nccl is not None:
                lane.members.nccl.abort_soon()


def is_aborted() -> bool:
    """Whether :func:`abort` was called for the world that this process is in."""
    return _wires is not None and _wires.broken is not None


def abandon() -> None:
    """Leave an elastic world, broken or not, and take a provisional place; nobody is waited for.

    Does nothing outside a world. To be called in the training thread. Process sets are unregistered.
    """
    global _provisional, _joined, _wires
    with _lock:
        context = _current
        if context is None:
            return
        me, config, number = context.world.me, context.engine.config, context.world.generation
        _end("this rank has left the generation: it is over.")
        _provisional = _Provisional(me, config, number)
        _joined = _wires = None


def _end(text: str) -> None:
    global _current
    context, _current = _current, None
    if context is None:
        return
    for process_set in context.process_sets.values():
        process_set.registered_as(None)
    context.engine.close(text)
    let_end([context.lane, *context.lanes.values()])
    if context.wires is not None:
        context.wires.cut(text)
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
