"""``hvd.elastic.run``: continues training when the membership changes, from the last commit or the current state."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from spark_hvd.context import global_state, leave
from spark_hvd.context import init as context
from spark_hvd.world import launcher as elastic_launcher
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError, DuplicateNameError, HostsUpdatedInterrupt, MismatchError
from spark_hvd.world.launcher import ElasticLauncher


class Restorable(Protocol):
    """The methods that the function's first argument must have; see :class:`spark_hvd.elastic.state.State`."""

    @property
    def commits(self) -> int:
        """Number of commits so far; -1 before the first sync."""

    def sync(self) -> None:
        """Make the state the same on all ranks. Collective."""

    def restore(self) -> None:
        """Go back to the last commit."""

    def on_reset(self) -> None:
        """Adapt to a new world."""


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Restorable)

_VERDICT_SECONDS = 3.0
"""Seconds to wait, after an error of torch, for the launcher to say that the generation is over."""


@dataclass(frozen=True, slots=True)
class WorldHook:
    """Functions that are called when a world begins and ends, for objects that outlive a world."""

    bind: Callable[[], None]
    """Called in each new world, on all ranks, before the state is synchronised. It may be collective."""
    release: Callable[[], None]
    """Called when the world is over, before the rank leaves it. It must not be collective."""


_hooks: list[WorldHook] = []
_running: str | None = None


def register_world_hook(hook: WorldHook) -> None:
    """Register a hook to call for each world. Modules that need one call this when they are imported."""
    _hooks.append(hook)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function, ``func(state, ...)``, so that it survives changes of the membership.

    In an elastic job the function is called again in every generation of ranks, with a state that is the same on all of
    them: that of the last commit if a rank was lost, the current one if ranks joined or left in order. The function
    must therefore continue from the state. In other jobs it is called once.

    The function's first argument is a state, such as ``hvd.elastic.TorchState``. Call collectives only inside it.

    Returns:
        A function that takes the same arguments and returns what `func` returns.
    """

    @functools.wraps(func)
    def trained(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        global _running
        name = getattr(func, "__qualname__", repr(func))
        _require_state(name, state)
        if _running is not None:
            raise RuntimeError(f"{name} was called inside {_running}; elastic functions cannot be nested.")
        launcher = elastic_launcher.installed()
        _running = name
        try:
            if launcher is None:
                if not global_state.is_initialized():
                    context.init()
                state.sync()
                return func(state, *args, **kwargs)
            return _through_generations(launcher, state, lambda: func(state, *args, **kwargs))
        finally:
            _running = None

    return trained


def _require_state(name: str, state: object) -> None:
    missing = [method for method in ("sync", "restore", "on_reset") if not callable(getattr(state, method, None))]
    if missing:
        raise TypeError(
            f"{name}: the first argument of a function decorated with hvd.elastic.run is its state, such as "
            f"hvd.elastic.TorchState(...); got {type(state).__name__}, which has no {' and no '.join(missing)}."
        )


def _through_generations(launcher: ElasticLauncher, state: Restorable, call: Callable[[], R]) -> R:
    _leave()  # the world of a previous elastic function
    global_state.global_state.functions += 1
    before, is_first = global_state.rank_info(), True
    while True:
        _enter(launcher)
        broken = None
        kept = False
        try:
            for hook in _hooks:
                hook.bind()
            me = global_state.rank_info()
            if not is_first or (me.rank, me.size) != (before.rank, before.size):
                state.on_reset()
            before, is_first = me, False
            state.sync()
            activity.keep_steps()
            launcher.committed(getattr(state, "_count", state.commits))  # a new rank has the state now
            value = call()
            if launcher.finished():
                return value
        except HostsUpdatedInterrupt:
            kept = True
        except RuntimeError as error:
            if not _is_fault_of_the_world(error, launcher):
                raise
            broken = str(error)
        # Here, the exception no longer exists, nor do its frames, which had references to the old world.
        if kept:
            launcher.yielded()
        elif broken is not None:
            launcher.broken(broken)
        _leave()
        if not kept:
            state.restore()
            activity.undo_steps()


def _enter(launcher: ElasticLauncher) -> None:
    while True:
        with contextlib.suppress(CollectiveError):  # the launcher knows, and has us try again
            return launcher.enter()


def _is_fault_of_the_world(error: RuntimeError, launcher: ElasticLauncher) -> bool:
    """Return whether an error means that the world is broken. Our errors say so; for torch's, ask the launcher."""
    if isinstance(error, CollectiveError):
        return True
    if isinstance(error, MismatchError | DuplicateNameError):  # a mistake in the program, which would happen again
        return False
    deadline = time.monotonic() + _VERDICT_SECONDS
    while launcher.world_failure is None and not leave.is_aborted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _leave() -> None:
    for hook in _hooks:
        hook.release()
    leave.abandon()
    gc.collect()  # process groups in reference cycles, such as DDP's, would keep their threads and sockets
