"""Copies of the last commit of a state, made at once, or in the background while training continues.

Two sets of buffers take turns, so that the last commit is kept until the next one is complete. They are allocated once.

Parameters and optimizer state only change in an optimizer's step, so they need no copy before the next step. A thread
copies those on the CPU, and a separate stream those on a GPU. :meth:`Snapshots.wait_copied`, called right before the
step, waits for these copies. It also compares version counters, in the training thread, where no tensor is being
changed: if something else has changed such a tensor, the commit is void and the previous one stays valid. From then on,
these tensors are copied at once. (A change through ``.data`` does not change the version counter.)
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from spark_hvd.elastic.skeleton import TensorRef, TensorTable, unflatten
from spark_hvd.elastic.sync import flatten_all
from spark_hvd.transport.host.pages import pinned
from spark_hvd.transport.torch_private import changes, copy_all


@dataclass(slots=True)
class Commit:
    """A set of buffers, and the commit that they hold.

    Attributes:
        number: The number of the commit; -1 before the first.
        extras: What :meth:`Snapshots.take` keeps by reference.
        skeletons: Name -> skeleton, whose plain objects are copies.
        buffers: Tensors on the CPU, by the numbers of their references.
        devices: The device from which each buffer was copied.
        events: Events to wait for before the buffers can be read.
    """

    number: int = -1
    extras: Any = None
    skeletons: dict[str, Any] = field(default_factory=dict)
    buffers: list[torch.Tensor] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    events: list[tuple[torch.device, torch.cuda.Event]] = field(default_factory=list)

    def value(self, name: str, *, own: bool) -> Any:
        """Return the value of a name.

        With ``own``, its tensors are new ones on the devices of the originals. Otherwise they are the buffers on the
        CPU, which the caller may only read.
        """
        self.wait()
        copies: dict[int, torch.Tensor] = {}

        def tensor_of(ref: TensorRef) -> torch.Tensor:
            if not own:
                return self.buffers[ref.number]
            if ref.number not in copies:
                copies[ref.number] = self.buffers[ref.number].to(self.devices[ref.number], copy=True)
            return copies[ref.number]

        return unflatten(copy.deepcopy(self.skeletons[name]), tensor_of)

    def wait(self) -> None:
        """Wait until the copies from GPUs are complete."""
        for _, event in self.events:
            event.synchronize()
        self.events.clear()


@dataclass(frozen=True, slots=True)
class _PendingCommit:
    """A commit that is still being copied."""

    commit: Commit
    sources: dict[int, torch.Tensor]
    """The tensors that are being copied, by number."""
    versions: list[int]
    copying: _Copying | None


class Snapshots:
    """The commits of one state. Only one thread may use them."""

    def __init__(self) -> None:
        self._last: Commit | None = None
        self._spare: Commit | None = None
        self._pending: _PendingCommit | None = None
        self._mutated: set[int] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(
        self, number: int, content: Mapping[str, Any], extras: Any = None, stable: Collection[Hashable] = ()
    ) -> None:
        """Begin a commit. Plain objects, and all tensors that are not stable, are copied before this returns.

        Args:
            number: The number of the commit.
            content: The values to commit, by name.
            extras: A value that is kept by reference.
            stable: Keys of tensors that do not change before :meth:`wait_copied`.

        Raises:
            TypeError: A value cannot be copied, such as a sparse tensor or a lock.
            RuntimeError: The copy of the previous commit failed.
        """
        self.wait_copied()
        table = TensorTable()
        skeletons = _copied(flatten_all(table, content))
        commit, self._spare = self._spare or Commit(), None
        commit.number, commit.extras, commit.skeletons = number, extras, skeletons
        commit.buffers = _buffers(table.tensors, commit.buffers[: len(table.tensors)])
        commit.devices = [tensor.device for tensor in table.tensors]
        commit.events = []
        later = [
            index
            for index, (tensor, key) in enumerate(zip(table.tensors, table.keys, strict=True))
            if key in stable and self._may_copy_later(index, tensor)
        ]
        self._copy(commit, table.tensors, sorted(set(range(len(table.tensors))) - set(later)))
        if not later:
            self._spare, self._last = self._last, commit
            return
        sources = {index: table.tensors[index] for index in later}
        versions = [changes(source) for source in sources.values()]
        self._pending = _PendingCommit(commit, sources, versions, self._copy_later(commit, table.tensors, later))

    def wait_copied(self) -> None:
        """Wait until the pending commit is copied. Call this before a step may change stable tensors.

        For tensors on a GPU, the current stream waits rather than the host.

        Raises:
            RuntimeError: The copy failed. The previous commit stays valid.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._spare = pending.commit
        if pending.copying is not None:
            pending.copying.wait()
        for device, event in pending.commit.events:
            torch.cuda.current_stream(device).wait_event(event)
        changed = [
            index
            for (index, source), version in zip(pending.sources.items(), pending.versions, strict=True)
            if changes(source) != version
        ]
        if not changed:
            self._spare, self._last = self._last, pending.commit
            return
        self._mutated.update(changed)
        shape = tuple(pending.sources[changed[0]].shape)
        warnings.warn(
            f"{len(changed)} parameters or tensors of an optimizer's state, the first of shape {shape}, were changed "
            f"between state.commit() and the next optimizer.step(). Commit {pending.commit.number} is void, and the "
            "previous one stays valid. From now on, commits copy these tensors at once, which takes longer.",
            stacklevel=2,
        )

    def last(self) -> Commit | None:
        """Wait for the pending copy, and return the last complete commit; None if there is none yet.

        Raises:
            RuntimeError: That copy failed. This is raised only once.
        """
        self.wait_copied()
        return self._last

    def copied(self) -> Snapshots:
        """Return new snapshots with a copy of the last commit. They can be pickled if the committed values can.

        Raises:
            RuntimeError: The pending copy failed. This is raised only once.
        """
        result, last = Snapshots(), self.last()
        if last is not None:
            last.wait()
            result._last = replace(last, buffers=[buffer.clone() for buffer in last.buffers])
        return result

    def _may_copy_later(self, number: int, tensor: torch.Tensor) -> bool:
        # The first commit is copied at once, because there is no previous one to fall back on.
        return self._last is not None and number not in self._mutated and not tensor.is_inference()

    def _copy(self, commit: Commit, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        on_cpu = [index for index in indices if not tensors[index].is_cuda]
        if on_cpu:
            copy_all([commit.buffers[index] for index in on_cpu], [tensors[index] for index in on_cpu])
        on_gpu = [index for index in indices if tensors[index].is_cuda]
        for index in on_gpu:  # on the current stream, so that later changes on it wait
            commit.buffers[index].copy_(tensors[index], non_blocking=True)
        for device in {tensors[index].device for index in on_gpu}:
            commit.events.append((device, torch.cuda.current_stream(device).record_event()))

    def _copy_later(self, commit: Commit, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> _Copying | None:
        for device in {tensors[index].device for index in indices if tensors[index].is_cuda}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for index in indices:
                    if tensors[index].device == device:
                        commit.buffers[index].copy_(tensors[index], non_blocking=True)
                        tensors[index].record_stream(stream)
                commit.events.append((device, stream.record_event()))
        on_cpu = [index for index in indices if not tensors[index].is_cuda]
        if not on_cpu:
            return None
        return _Copying([commit.buffers[index] for index in on_cpu], [tensors[index] for index in on_cpu])


class _Copying(threading.Thread):
    """A thread that copies tensors in one call, which releases Python's lock so that training continues."""

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        super().__init__(name="spark_hvd commit", daemon=True)
        self._targets, self._sources = targets, sources
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See threading.Thread."""
        try:
            copy_all(self._targets, self._sources)
        except BaseException as error:  # wait() raises it in the training thread
            self._error = error
        finally:
            del self._targets, self._sources

    def wait(self) -> None:
        """Block until everything is copied."""
        self.join()
        if self._error is not None:
            raise RuntimeError(f"copying the state for a commit failed: {self._error}") from self._error


def _copied(skeletons: dict[str, Any]) -> dict[str, Any]:
    memo: dict[int, Any] = {}  # shared by all names, so that an object under two names is copied once
    copies: dict[str, Any] = {}
    for name, skeleton in skeletons.items():
        try:
            copies[name] = copy.deepcopy(skeleton, memo)
        except Exception as error:  # __deepcopy__ may raise anything
            raise TypeError(f"{name!r}: {type(skeleton).__name__} cannot be copied: {error}") from error
    return copies


def _buffers(tensors: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for copies of the tensors: each old buffer if it fits, else a new one."""
    buffers = [buffer if _fits(tensor, buffer) else None for tensor, buffer in zip_longest(tensors, old)]
    missing = [index for index, buffer in enumerate(buffers) if buffer is None and tensors[index].is_cuda]
    for index, memory in zip(missing, pinned([tensors[index].nbytes for index in missing]), strict=True):
        like = torch.empty_like(tensors[index], device="meta")
        buffers[index] = memory.view(like.dtype).as_strided(
            like.shape, like.stride(), memory.storage_offset() // like.itemsize
        )
    return [
        torch.empty_like(tensor, device="cpu", requires_grad=False) if buffer is None else buffer
        for tensor, buffer in zip(tensors, buffers, strict=True)
    ]


def _fits(tensor: torch.Tensor, old: torch.Tensor | None) -> bool:
    return (
        old is not None
        and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
        and (not tensor.is_cuda or old.is_pinned())
    )
