"""The last commit of a state, in memory of its own: copied at once, or in the background while training goes on.

Two sets of buffers take turns, so that the last commit stays whole until the next one is. They are allocated once.

Tensors that only an optimizer's step changes, parameters and optimizer state, need no copy before the next step: a
thread copies those on the CPU, and a stream beside the training's those on a GPU, and :meth:`Snapshots.wait_copied`,
called right before the step, waits. Whether such a tensor was changed by something else before that is seen from its
version counter, in the thread that trains, where nothing can be changing it meanwhile. The commit is then void, the one
before it stands, and tensors of that kind are copied at once from then on. (A change through ``.data`` counts no
version.)
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
    """One set of buffers, and what the commit in it is.

    Skeletons are by name, and plain objects in them copies; ``buffers`` are on the CPU, by the number of their
    references, copied from ``devices``.
    """

    number: int = -1
    extras: Any = None
    skeletons: dict[str, Any] = field(default_factory=dict)
    buffers: list[torch.Tensor] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    events: list[tuple[torch.device, torch.cuda.Event]] = field(default_factory=list)

    def value(self, name: str, *, own: bool) -> Any:
        """Return the value of a name.

        With ``own``, its tensors are new ones, where they were; else the buffers, on the CPU, only to be copied from.
        """
        self.wait()
        made: dict[int, torch.Tensor] = {}

        def tensor_of(ref: TensorRef) -> torch.Tensor:
            if not own:
                return self.buffers[ref.number]
            if ref.number not in made:
                made[ref.number] = self.buffers[ref.number].to(self.devices[ref.number], copy=True)
            return made[ref.number]

        return unflatten(copy.deepcopy(self.skeletons[name]), tensor_of)

    def wait(self) -> None:
        """Wait until what was copied from GPUs is here."""
        for _, event in self.events:
            event.synchronize()
        self.events.clear()


@dataclass(frozen=True, slots=True)
class _PendingCommit:
    """A commit whose copy is under way."""

    commit: Commit
    sources: dict[int, torch.Tensor]
    """The tensors that are copied, by number."""
    versions: list[int]
    copying: _Copying | None


class Snapshots:
    """The commits of one state. To be used by one thread."""

    def __init__(self) -> None:
        self._last: Commit | None = None
        self._spare: Commit | None = None
        self._pending: _PendingCommit | None = None
        self._mutated: set[int] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(
        self, number: int, content: Mapping[str, Any], extras: Any = None, stable: Collection[Hashable] = ()
    ) -> None:
        """Begin a commit; plain objects and all tensors that are not stable are copied before this returns.

        ``extras`` are kept by reference; ``stable`` has keys of tensors that do not change before :meth:`wait_copied`.

        Raises:
            TypeError: There is something that cannot be copied: a sparse tensor or a lock, for example.
            RuntimeError: The copy of the commit before failed.
        """
        self.wait_copied()
        table = TensorTable()
        skeletons = _copied(flatten_all(table, content))
        commit, self._spare = self._spare or Commit(), None
        commit.number, commit.extras, commit.skeletons = number, extras, skeletons
        commit.buffers = _buffers(table.tensors, commit.buffers[: len(table.tensors)])
        commit.devices = [tensor.device for tensor in table.tensors]
        commit.events = []
        wait = [
            index
            for index, (tensor, key) in enumerate(zip(table.tensors, table.keys, strict=True))
            if key in stable and self._may_copy_later(index, tensor)
        ]
        later = set(wait)
        self._copy(commit, table.tensors, [index for index in range(len(table.tensors)) if index not in later])
        if not wait:
            self._spare, self._last = self._last, commit
            return
        sources = {index: table.tensors[index] for index in wait}
        versions = [changes(source) for source in sources.values()]
        self._pending = _PendingCommit(commit, sources, versions, self._copy_later(commit, table.tensors, wait))

    def wait_copied(self) -> None:
        """Wait until the commit under way is copied; to be called before a step may change stable tensors.

        On a GPU the current stream waits, not the host.

        Raises:
            RuntimeError: The copy failed. The commit before it stands.
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
            "one before it stands. From now on commits copy them at once, which takes longer.",
            stacklevel=2,
        )

    def last(self) -> Commit | None:
        """Return the last complete commit; None if there is none yet. Waits for the copy under way.

        Raises:
            RuntimeError: That copy failed; said once.
        """
        self.wait_copied()
        return self._last

    def copied(self) -> Snapshots:
        """Others with the same last commit, in memory of its own. They pickle where what was committed does.

        Raises:
            RuntimeError: The copy under way failed; said once.
        """
        made, last = Snapshots(), self.last()
        if last is not None:
            last.wait()
            made._last = replace(last, buffers=[buffer.clone() for buffer in last.buffers])
        return made

    def _may_copy_later(self, number: int, tensor: torch.Tensor) -> bool:
        # Without a commit to fall back on, the first one is made at once.
        return self._last is not None and number not in self._mutated and not tensor.is_inference()

    def _copy(self, commit: Commit, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        on_cpu = [index for index in indices if not tensors[index].is_cuda]
        if on_cpu:
            copy_all([commit.buffers[index] for index in on_cpu], [tensors[index] for index in on_cpu])
        on_gpu = [index for index in indices if tensors[index].is_cuda]
        for index in on_gpu:  # in the order of the current stream, so whatever changes them later waits there
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
    """Copies tensors once, and ends; one call without Python's lock, so that training is not held up."""

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        super().__init__(name="spark_hvd commit", daemon=True)
        self._targets, self._sources = targets, sources
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See threading.Thread."""
        try:
            copy_all(self._targets, self._sources)
        except BaseException as error:  # whatever it is, the thread that trains is to hear of it
            self._error = error
        finally:
            del self._targets, self._sources

    def wait(self) -> None:
        """Block until all is copied."""
        self.join()
        if self._error is not None:
            raise RuntimeError(f"copying the state for a commit failed: {self._error}") from self._error


def _copied(skeletons: dict[str, Any]) -> dict[str, Any]:
    memo: dict[int, Any] = {}  # one, so that what two names share stays shared
    copies: dict[str, Any] = {}
    for name, skeleton in skeletons.items():
        try:
            copies[name] = copy.deepcopy(skeleton, memo)
        except Exception as error:  # whatever a __deepcopy__ raises
            raise TypeError(f"{name!r}: {type(skeleton).__name__} cannot be copied: {error}") from error
    return copies


def _buffers(tensors: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for copies of the tensors: the old one of each if it fits."""
    found = [there if _fits(tensor, there) else None for tensor, there in zip_longest(tensors, old)]
    missing = [index for index, there in enumerate(found) if there is None and tensors[index].is_cuda]
    for index, memory in zip(missing, pinned([tensors[index].nbytes for index in missing]), strict=True):
        like = torch.empty_like(tensors[index], device="meta")
        found[index] = memory.view(like.dtype).as_strided(
            like.shape, like.stride(), memory.storage_offset() // like.itemsize
        )
    return [
        torch.empty_like(tensor, device="cpu", requires_grad=False) if there is None else there
        for tensor, there in zip(tensors, found, strict=True)
    ]


def _fits(tensor: torch.Tensor, old: torch.Tensor | None) -> bool:
    return (
        old is not None
        and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
        and (not tensor.is_cuda or old.is_pinned())
    )
