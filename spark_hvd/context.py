"""The world that this process has joined: init, join, shutdown, and the one current Context."""

from __future__ import annotations

import atexit
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from spark_hvd.communicator import Communicator
from spark_hvd.distributed import TorchCommunicator
from spark_hvd.errors import NotInitializedError
from spark_hvd.kv import HashStore, PrefixStore, Store
from spark_hvd.launch_env import read_launch_env
from spark_hvd.layout import RankInfo, WorldLayout
from spark_hvd.local import LocalCommunicator
from spark_hvd.rendezvous import adopted_world, everyones, launched_world, meeting
from spark_hvd.world import World

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


def init() -> None:
    """Join the world that the launcher made; does nothing if that has happened already.

    In order: the world this process was in before :func:`shutdown`; a default process group that the user initialised
    with torch.distributed, which is used and never destroyed; the world that torchrun's variables describe; a world of
    one. torch's default process group is left initialised, for DDP, FSDP2 and other users of torch.distributed.

    Raises:
        ValueError: The launcher's environment variables are incomplete.
        CollectiveError: The other ranks could not be reached.
    """
    with _lock:
        if _current is not None:
            return
        if dist.is_initialized():
            _adopt_default_group()
        elif _joined is not None:
            join(_joined.world, _joined.kv, timeout=_joined.timeout, backend=_joined.backend)
        elif (env := read_launch_env()) is not None:
            join(*launched_world(env))
        else:
            _join_nobody()


def join(world: World, kv: Store, *, timeout: float = DEFAULT_TIMEOUT, backend: str | None = None) -> None:
    """Join a world; launchers call it in the rank's process before the user's code, for which init() is then a no-op.

    Args:
        world: Who I am.
        kv: A store that all ranks reach. One of the ranks or the launcher must keep it served.
        timeout: Seconds until a collective gives up on its peers.
        backend: "gloo" or "nccl" for every tensor; None for NCCL on CUDA tensors and gloo on CPU tensors.

    Raises:
        RuntimeError: This process is in a world already.
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
        _enter(world, layout, prefixed, timeout, backend)


def _join_nobody() -> None:
    layout = WorldLayout.of_ranks(["localhost"])
    _enter(World(layout.ranks[0], None), layout, HashStore(), DEFAULT_TIMEOUT, None)


def _adopt_default_group() -> None:
    global _current, _adoptions
    world, layout, kv = adopted_world(f"spark_hvd/adopted/{_adoptions}")
    _adoptions += 1
    _current = Context(world, layout, _communicator(world), kv, owns_default_group=False)


def _enter(world: World, layout: WorldLayout, kv: Store, timeout: float, backend: str | None) -> None:
    global _current
    if backend is None:
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
    _current = Context(world, layout, _communicator(world), kv, owns_default_group=True)


def _communicator(world: World) -> Communicator:
    return LocalCommunicator() if world.me.size == 1 else TorchCommunicator()


def shutdown() -> None:
    """Leave the world; does nothing outside one. init() may follow, if it follows on every rank.

    A default process group that the user initialised himself stays. Called when the interpreter exits.
    """
    global _current
    with _lock:
        context, _current = _current, None
        if context is None:
            return
        context.communicator.close()
        # The user may have destroyed the default group himself.
        if context.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()


atexit.register(shutdown)
