"""Joining a world: init() for users, and join() for launchers.

An elastic rank joins one world after another. Between two worlds, and before the first, it has a provisional rank: it
can answer questions about it, but collectives are not possible.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_hvd.collectives.members import open_members
from spark_hvd.context import forks  # noqa: F401  registers what keeps forked processes out of the world
from spark_hvd.context.global_state import Context, JoinedWorld, PendingMember, current, global_state, refuse_fork
from spark_hvd.context.leave import end, shutdown
from spark_hvd.engine.engine import Engine
from spark_hvd.transport.communicator import Communicator
from spark_hvd.transport.connections import Connections, sockets
from spark_hvd.transport.distributed import MPI_BACKEND, TorchCommunicator
from spark_hvd.transport.groups import Groups, free_groups_last
from spark_hvd.transport.local import LocalCommunicator
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.mpi.start import abort_on_exceptions, is_mpi_communicator, part_of, ranks_of, world_of
from spark_hvd.transport.nccl import NcclGroups
from spark_hvd.transport.registry import ConnectionRegistry
from spark_hvd.transport.rendezvous import adopted_world, all_gather_facts, launched_world, meeting, own_address
from spark_hvd.transport.torch_private import HashStore, PrefixStore, Store, forget_names
from spark_hvd.world import launcher as elastic_launcher
from spark_hvd.world.activity import activity
from spark_hvd.world.config import Config
from spark_hvd.world.env import read_config, read_launch_env, read_mpi_env
from spark_hvd.world.errors import CollectiveError, PlanMismatchError
from spark_hvd.world.layout import RankInfo, World, WorldLayout, ranks_in

if TYPE_CHECKING:
    from spark_hvd.collectives.process_set import ProcessSet
    from spark_hvd.transport.mpi.library import MPI

DEFAULT_TIMEOUT = 1800.0
"""Seconds after which a collective fails if peers do not take part, as in torch.distributed."""

_log = logging.getLogger("spark_hvd")
_adoptions = 0
_started_by_mpi = False


def init(
    comm: Sequence[int] | MPI.Intracomm | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    **settings: Any,
) -> None:
    """Join the world that the launcher made. Does nothing in a joined world, if no arguments are given.

    The first of these that exists is joined: the world this process was in before :func:`shutdown`; a default process
    group that the user initialised with torch.distributed, which is used and never destroyed; the world that torchrun's
    variables describe; over MPI, the world that mpiexec started; a world of one. torch's default process group is left
    initialised, for DDP, FSDP2 and other users of torch.distributed.

    Args:
        comm: Ranks of the launcher's world that form their own world, in which they are renumbered from 0 in ascending
            order; each of them must pass the same list. Or a communicator of mpi4py, which each of its ranks must pass:
            MPI then makes the world from these ranks, with their numbers. None: all ranks.
        process_sets: Process sets to register, the same on every rank, see
            :func:`spark_hvd.torch.add_process_set`. Horovod's "dynamic" is accepted, but not needed.
        **settings: Values that tune named collectives, see :class:`spark_hvd.world.config.Config`. Rank 0's apply to
            all ranks. They may also be given in a joined world. They override the environment variables HOROVOD_*.

    Raises:
        ValueError: A setting is wrong, `comm` is not a list of ranks that includes this one, a process set cannot be
            made, or the launcher's environment variables are incomplete.
        ImportError: An MPI process manager started this process, but mpi4py is not installed.
        TypeError: A setting does not exist.
        MismatchError: Ranks pass different process sets.
        CollectiveError: The other ranks could not be reached.
    """
    with global_state.lock:
        if global_state.pending is not None:
            _prepare(comm, process_sets, settings)
            return
        config = replace(read_config(), **settings)
        starts_timeline = global_state.context is not None and "timeline" in settings
        if global_state.context is None:
            _join_as_launched(comm, config)
        elif settings:
            _tune(global_state.context, settings)
        if comm is not None:
            _join_part(comm, config)
        if _started_by_mpi:
            abort_on_exceptions()  # no launcher of spark_hvd supervises the ranks
    if process_sets is not None and process_sets != "dynamic":
        from spark_hvd.context.register import register_all

        register_all(process_sets)
    if starts_timeline and comm is None and config.timeline is not None:
        start_timeline(config.timeline, config.timeline_mark_cycles)


def _tune(here: Context, settings: dict[str, Any]) -> None:
    """Apply the settings of init() in a joined world."""
    if settings.get("stall_timeout", 0.0) is None:
        settings["stall_timeout"] = here.groups.timeout
    config = replace(here.engine.config, **settings)
    warning = here.engine.config.kept_text(config)
    if warning is not None and here.world.me.rank == 0:  # rank 0's settings apply to all
        _log.warning(warning)
    here.engine.tune(config)


def _prepare(comm: object, process_sets: object, settings: dict[str, Any]) -> None:
    """Keep the settings of init() outside a world of an elastic rank, for its next worlds."""
    outside = global_state.pending
    assert outside is not None
    if comm is not None:
        raise ValueError(f"comm={comm!r}: an elastic world cannot be divided; register process sets instead.")
    if process_sets and process_sets != "dynamic":
        raise ValueError(
            f"process_sets={process_sets!r}: process sets end with the world, and an elastic rank joins one world "
            "after another; register them with hvd.add_process_set() in the function decorated with hvd.elastic.run."
        )
    if settings:
        global_state.pending = replace(outside, config=replace(outside.config or read_config(), **settings))


def expect(me: RankInfo) -> None:
    """Set the provisional rank in the next world. Launchers of elastic ranks call this before the user's code.

    Then init() does nothing, rank() and the like return the provisional values, and collectives raise
    NotInitializedError. :func:`join` replaces the provisional rank by a world, and
    :func:`~spark_hvd.context.leave.abandon` returns to one.
    """
    with global_state.lock:
        assert global_state.context is None, "a rank in a world cannot have a provisional rank"
        before = global_state.pending
        global_state.pending = PendingMember(me, None, 0) if before is None else replace(before, me=me)


def _join_as_launched(comm: Sequence[int] | MPI.Intracomm | None, config: Config) -> None:
    refuse_fork()
    if dist.is_initialized():
        _adopt_default_group(config)
    elif is_mpi_communicator(comm):
        _join_mpi(comm, config)
    elif (before := global_state.joined) is not None:
        join(before.world, before.kv, timeout=before.timeout, backend=before.backend, config=config)
    elif (env := read_launch_env()) is not None:
        join(*launched_world(env), config=config)
    elif (started := read_mpi_env()) is not None:
        _join_mpi(None, config, started.master)
    else:
        layout = WorldLayout.of_ranks(["localhost"])
        _enter(World(layout.ranks[0], None), layout, HashStore(), DEFAULT_TIMEOUT, None, config)


def _join_mpi(comm: MPI.Intracomm | None, config: Config, master: str | None = None) -> None:
    global _started_by_mpi
    join(*world_of(comm, master), backend="mpi", config=config)
    _started_by_mpi = True


def _join_part(comm: Sequence[int] | MPI.Intracomm, config: Config) -> None:
    """Leave the world, and join one that consists of some of its ranks, unless they are all of them."""
    here = current()
    me, size = here.world.me.rank, here.world.me.size
    ranks = ranks_of(comm, here.world.mpi, size) if is_mpi_communicator(comm) else ranks_in(comm, size)
    if ranks == list(range(size)):
        return
    if me not in ranks:
        raise ValueError(f"comm={comm!r} does not have this rank, {me}; each rank must pass its own world.")
    if global_state.joined is None or not here.owns_default_group:
        raise ValueError(
            f"comm={comm!r}: torch.distributed was initialised before spark_hvd, so its world cannot be divided; "
            "register a process set instead."
        )
    layout = WorldLayout.of_ranks([here.layout.ranks[rank].host for rank in ranks])
    mpi = part_of(here.world.mpi, ranks) if global_state.joined.backend == "mpi" else None
    world = replace(here.world, me=layout.ranks[ranks.index(me)], mpi=mpi)
    kv = PrefixStore(f"part/{'-'.join(map(str, ranks))}", global_state.joined.kv)
    timeout, backend = global_state.joined.timeout, global_state.joined.backend
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
    """Join a world. Launchers call this in the rank's process before the user's code, where init() then does nothing.

    Args:
        world: This rank and its world.
        kv: A store that all ranks can reach. A rank or the launcher must keep it running.
        timeout: Seconds after which a collective fails if peers do not take part.
        backend: "gloo", "nccl" or "mpi" for every tensor; None for NCCL on CUDA tensors and gloo on CPU tensors. For
            "mpi", an MPI process manager that numbers the ranks in the same way must have started the process.
        config: Values that tune named collectives; None for those of the environment.

    Raises:
        RuntimeError: This process is already in a world, or MPI numbers the ranks in another way.
        ImportError: `backend` is "mpi", but there is no mpi4py.
        CollectiveError: The other ranks could not be reached, or abort() was called for this generation.
    """
    with global_state.lock:
        if global_state.context is not None:
            raise RuntimeError(
                f"this process is rank {global_state.context.world.me.rank} of a world already; "
                "call hvd.shutdown() before joining another."
            )
        times, before = 0, global_state.joined
        if before is not None and before.kv is kv and before.world.generation == world.generation:
            times = before.times + 1
        global_state.joined = JoinedWorld(world, kv, timeout, backend, times)
        prefixed = PrefixStore(f"spark_hvd/{world.generation}/{times}", kv)
        config = config or (global_state.pending and global_state.pending.config) or read_config()
        if elastic_launcher.installed() is None:
            _meet(world, prefixed, timeout, backend, config)
        else:
            _meet_elastically(world, prefixed, timeout, backend, config)
        global_state.pending = None


def _meet(world: World, kv: Store, timeout: float, backend: str | None, config: Config) -> None:
    facts = {**asdict(world.me), "dialect": config.dialect}
    infos = all_gather_facts(facts, kv, world.me.rank, world.me.size)
    _require_one_dialect([info.pop("dialect") for info in infos])
    layout = WorldLayout(tuple(RankInfo(**info) for info in infos), tuple(range(world.me.size)))
    _enter(world, layout, kv, timeout, backend, config)


def _require_one_dialect(dialects: Sequence[str]) -> None:
    if other := next((rank for rank, dialect in enumerate(dialects) if dialect != dialects[0]), None):
        raise PlanMismatchError(
            f"the dialect is {dialects[0]!r} on rank 0 and {dialects[other]!r} on rank {other}: expected the same, "
            "because they treat gradients and joins differently. Next: set SPARK_HVD_DIALECT equally for all ranks, or "
            "import horovod, or spark_hvd, on all of them"
        )


def _meet_elastically(world: World, kv: Store, timeout: float, backend: str | None, config: Config) -> None:
    """Join a world that abort() can end at any time, even before all ranks have joined."""
    registry = global_state.register_connections(ConnectionRegistry(world.generation, world.endpoint, world.me.size))
    try:
        with registry.establishing():
            _meet(world, kv, timeout, backend, config)
    except BaseException:
        # The world may have been joined just before it was aborted.
        end("this rank gave up the generation.")
        global_state.joined = global_state.registry = None
        raise


def _adopt_default_group(config: Config) -> None:
    global _adoptions
    world, layout, kv = adopted_world(f"spark_hvd/adopted/{_adoptions}")
    _adoptions += 1
    _settle(world, layout, kv, DEFAULT_TIMEOUT, config, owns_default_group=False)


def _enter(world: World, layout: WorldLayout, kv: Store, timeout: float, backend: str | None, config: Config) -> None:
    if backend == "mpi":
        mpi_backend.use(world.mpi, world.me.rank, world.me.size)
        backend = MPI_BACKEND
    elif backend is None:
        # Without a GPU, use plain "gloo": with "cpu:gloo", torch warns about its own plugins for every group.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    before = sockets()
    try:
        with meeting(world.me.rank, world.me.size):
            dist.init_process_group(
                backend,
                store=PrefixStore("default_group", kv),
                rank=world.me.rank,
                world_size=world.me.size,
                timeout=timedelta(seconds=timeout),
            )
    except CollectiveError:
        forget_names()
        raise
    try:
        if global_state.registry is not None:
            assert dist.group.WORLD is not None
            global_state.registry.add(Connections.since(before, dist.group.WORLD))
        _settle(world, layout, kv, timeout, config, owns_default_group=True)
    except BaseException as error:
        if global_state.registry is not None:
            global_state.registry.abort(str(error))  # else destroying the group would wait for collectives in flight
        dist.destroy_process_group()
        raise


def _settle(
    world: World, layout: WorldLayout, kv: Store, timeout: float, config: Config, *, owns_default_group: bool
) -> None:
    """Open the queue of all ranks of the default process group. Then the world is joined."""
    if config.stall_timeout is None:
        config = replace(config, stall_timeout=timeout)
    registry = global_state.registry
    engine = Engine(config, world.secret, lambda: own_address(world.endpoint), world.ports)
    size = world.me.size
    groups = Groups(kv, timeout, owns_default_group=owns_default_group, registry=registry)
    try:
        if registry is not None:
            registry.on_abort(engine.abort)
        communicator: Communicator = LocalCommunicator() if size == 1 else TorchCommunicator()
        # A default group that the user initialised must not be destroyed. Ours is looked up rather than kept: its
        # connections close with the last reference, which shows peers that it was destroyed.
        nccl = NcclGroups(lambda: [dist.group.WORLD if owns_default_group else None, *groups.of(0)])
        members = open_members(0, range(size), layout, world.me.rank, groups, config, nccl)
        queue = engine.open_queue(members, PrefixStore("queue/0", kv))
    except BaseException:
        engine.close("init() failed")
        raise
    activity.enter_world()
    global_state.context = Context(
        world, layout, communicator, kv, owns_default_group, engine, queue, groups, registry=registry
    )
    activity.news.set()
    if config.timeline is not None:
        try:
            start_timeline(_numbered(config.timeline, world.generation), config.timeline_mark_cycles)
        except OSError:
            global_state.context = None
            engine.close("init() failed")
            raise


def _numbered(path: str, generation: int) -> str:
    """Return the path for a generation, so that generations do not overwrite each other's timelines."""
    stem, suffix = os.path.splitext(path)
    return path if generation == 0 else f"{stem}.{generation}{suffix}"


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to record the collectives of all ranks as a Chrome trace; see docs/timeline.md.

    Call it on rank 0; on other ranks it does nothing.

    Args:
        file_path: The file to write, on rank 0's host.
        mark_cycles: Whether to mark when the engine wakes up.

    Raises:
        NotInitializedError: Before init().
        ValueError: A timeline is already being recorded.
        OSError: The file cannot be written.
    """
    here = current()
    if here.world.me.rank == 0:
        here.engine.timeline.start(file_path, mark_cycles, [info.host for info in here.layout.ranks])


def stop_timeline() -> None:
    """Stop recording, gather the events of all ranks, and complete the file. Without a recording, do nothing.

    Raises:
        NotInitializedError: Before init().
        OSError: The file could not be written.
    """
    here = current()
    if here.world.me.rank == 0:
        here.engine.timeline.stop()


free_groups_last()
mpi_backend.register()
