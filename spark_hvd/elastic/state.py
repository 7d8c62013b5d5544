"""State that survives changes of the world: it is committed to memory, restored after a failure, and synchronised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NoReturn

import torch

from spark_hvd.context.global_state import current
from spark_hvd.elastic.snapshot import Snapshots
from spark_hvd.elastic.sync import synchronize
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world import launcher as elastic_launcher
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import HostsUpdatedInterrupt, MismatchError

_UPDATED = "the members of the world are to change"


class State:
    """The first argument of a function decorated with ``hvd.elastic.run``; the base of all kinds of state.

    Args:
        bcast_object: Accepted for Horovod's sake; not needed.
        get_rank: Accepted for Horovod's sake; not needed.

    Attributes:
        commits: Number of the last save in the whole run, from 0; -1 before the first. It is equal on all ranks after
            :meth:`sync`. If the state was made with a value of this name, it is that value instead.
    """

    commits: int
    _number: int | None = None
    """The number of commits if `commits` is a value of the program."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self.commits = -1
        self._reset_callbacks: list[Callable[[], Any]] = []

    @property
    def _count(self) -> int:
        return self.commits if self._number is None else self._number

    @_count.setter
    def _count(self, number: int) -> None:
        if self._number is None:
            self.commits = number
        else:
            self._number = number

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call, in this order, after the members of the world have changed, before :meth:`sync`.

        Their changes to the state last only if made on the rank whose state the others get. That is usually the lowest
        one, so make the same changes on each rank.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new world after it has been joined: call :meth:`reset`, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Adapt everything that depends on rank and size, before the callbacks. This class does nothing."""

    def commit(self) -> None:
        """Save the state, and let pending changes of members take effect. Collective.

        Every rank must call it equally often, at the same points. After a failure, training continues from the last
        commit, so work done since then is repeated.

        Raises:
            HostsUpdatedInterrupt: The members change. Raised on all ranks; leave it to ``hvd.elastic.run``.
            MismatchError: Ranks committed different progress. Raised on every rank.
            CollectiveError: A peer or the network failed.
        """
        self.save()
        activity.keep_steps()
        changes = self._agree()
        launcher = elastic_launcher.installed()
        if launcher is not None:
            launcher.committed(self._count)  # only now, after all ranks have saved it
        if changes:
            self._interrupt()

    def check_host_updates(self) -> None:
        """Let pending changes of members take effect. Collective, with one small all-reduce.

        The state is saved only if members change. This is free if ranks are not elastic or there is only one rank.

        Raises:
            HostsUpdatedInterrupt, MismatchError, CollectiveError: See :meth:`commit`.
        """
        if self._agree():
            self.save()  # so that these steps are not lost if the next world breaks before all ranks have joined
            activity.keep_steps()
            self._interrupt()

    def _interrupt(self) -> NoReturn:
        self._interrupted()
        raise HostsUpdatedInterrupt(_UPDATED)

    def _interrupted(self) -> None:
        """Prepare for leaving the elastic function and the loops in it. This class does nothing."""

    def _agree(self) -> bool:
        """Check that all ranks have the same progress. Return on all whether the members will change. Collective."""
        launcher = elastic_launcher.installed()
        if launcher is None:
            return False
        wanted = int(launcher.update_wanted)
        communicator = current().communicator
        if communicator.size > 1:
            # The maximum of each number and of its negative shows all ranks whether it is equal everywhere.
            facts = self._facts()
            numbers = [wanted, *facts.values(), *(-fact for fact in facts.values())]
            mine = torch.tensor(numbers, dtype=torch.int64, device=communicator.fact_device)
            wanted, *greatest = communicator.allreduce(mine, ReduceOp.MAX).wait().tolist()
            for name, highest, negative in zip(facts, greatest, greatest[len(facts) :], strict=False):
                if highest != -negative:
                    raise MismatchError(
                        f"state.check_host_updates(): {name} is {-negative} on one rank and {highest} on another; all "
                        "ranks must commit and record batches at the same points."
                    )
        return bool(wanted)

    def _facts(self) -> dict[str, int]:
        """Return numbers that must be equal on all ranks when they commit. All ranks must have the same names."""
        return {"state.commits": self._count}

    def save(self) -> None:
        """Keep a copy of the state in this process. Implementations must increment `commits`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy. Does nothing before the first."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state of all ranks equal, and save it. Collective."""
        raise NotImplementedError


class ObjectState(State):
    """State made of plain Python objects.

    Args:
        bcast_object: Accepted for Horovod's sake; not needed.
        get_rank: Accepted for Horovod's sake; not needed.
        **kwargs: Values by name. They become attributes, which you may assign to; other attributes are not state.
            Values are deep-copied, and pickled in :meth:`sync`; tensors in dicts, lists and tuples are sent without
            pickling. After a restore or a sync, an attribute may be another object than before.

    A copy or a pickle has its own commits and callbacks.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = list(kwargs)
        self._snapshots = Snapshots()
        for name, value in kwargs.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"{name!r} is an attribute of {type(self).__name__} itself; use another name.")
            setattr(self, name, value)
        if "commits" in kwargs:
            self._number = -1

    def __getstate__(self) -> dict[str, Any]:
        """Return the content of a copy or a pickle: the values, and a copy of the last commit."""
        return self.__dict__ | {"_reset_callbacks": list(self._reset_callbacks), "_snapshots": self._snapshots.copied()}

    def save(self) -> None:
        """Keep a copy of the state, in one of two sets of buffers that are allocated once.

        Raises:
            TypeError: A value cannot be copied, such as a sparse tensor or a lock.
            RuntimeError: The background copy of the previous save failed.
        """
        self._take(self._count + 1, self._stable())

    def restore(self) -> None:
        """Go back to the last copy: values, and `commits`. Does nothing before the first.

        Raises:
            RuntimeError: The background copy of the last save failed; a second call restores the one before.
        """
        commit = self._snapshots.last()
        if commit is None:
            return
        self._restore_extras(commit.extras)
        for name in commit.skeletons:
            self._load(name, commit.value(name, own=not self._copies(name)))
        self._count = commit.number
        self._renew()

    def sync(self) -> None:
        """Give all ranks the state of the rank with the most commits (the lowest of these), and save it. Collective.

        The states are then equal to the bit, including `commits`. Tensors are sent in batches of bounded size, plain
        objects as one pickle. The random number generators of torch, numpy and Python are not part of the state.

        Raises:
            NotInitializedError: Outside a world.
            MismatchError: States of ranks have different entries, or one cannot load the others'. Raised on every rank;
                nothing has changed.
            ValueError: A value cannot be sent. Raised on every rank; nothing has changed.
            CollectiveError: A peer or the network failed; :meth:`restore` undoes what has changed.
        """
        communicator = current().communicator
        root = communicator.rank
        if self._snapshots.last() is None:  # so that restore() can undo a sync that fails half-way
            self._take(self._count)
        if communicator.size > 1:
            content = self._content()
            received, self._count, root = synchronize(
                communicator, content, {name: self._kind(name) for name in content}, self._count, self._misfit
            )
            if communicator.rank != root:
                for name, value in received.items():
                    self._load(name, value)
        self._sync_others(root)
        self._take(max(self._count, 0))
        if communicator.rank == root and (commit := self._snapshots.last()) is not None:
            # On other ranks, these values have just been loaded. The root's may be partly used, so load them too.
            for name in filter(self._reloads, commit.skeletons):
                self._load(name, commit.value(name, own=not self._copies(name)))
        self._renew()

    def _take(self, number: int, stable: Collection[Hashable] = ()) -> None:
        self._snapshots.take(number, self._content(), self._extras(), stable)
        self._count = number

    # ---- methods that kinds of state override ----------------------------------------------------------------------

    def _content(self) -> dict[str, Any]:
        """Return the values to save and send, by name."""
        return {name: getattr(self, name) for name in self._names}

    def _load(self, name: str, value: Any) -> None:
        """Load a value that :meth:`_content` returned, here or on another rank. Its tensors may be kept."""
        setattr(self, name, value)

    def _copies(self, name: str) -> bool:
        """Return whether :meth:`_load` copies tensors, from any device, rather than keeping them."""
        return False

    def _reloads(self, name: str) -> bool:
        """Return whether the root of a sync must :meth:`_load` the value too, because it may be partly used."""
        return False

    def _kind(self, name: str) -> str:
        return "a plain object"

    def _misfit(self, name: str, skeleton: Any) -> str | None:
        """Return why :meth:`_load` would fail for a value with this skeleton; None if it would not."""
        return None

    def _stable(self) -> Collection[Hashable]:
        """Return the keys of tensors that do not change until the snapshots are copied."""
        return ()

    def _extras(self) -> Any:
        """Return the value that a commit keeps by reference."""

    def _restore_extras(self, extras: Any) -> None:
        """Restore the value that a commit has kept by reference."""

    def _sync_others(self, root_rank: int) -> None:
        """Send other state of the root, which is not in :meth:`_content`. Collective."""

    def _renew(self) -> None:
        """Adapt to a state that was restored or synchronised. This class does nothing."""
