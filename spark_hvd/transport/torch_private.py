"""The private torch names that we need, in one place to check when torch changes.

docs/versions.md lists them by version, and tests/unit/test_private_names.py uses every one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Public in torch.distributed at run time, but torch's stubs export them only here.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm

if TYPE_CHECKING:
    from spark_hvd.store import Store as FileStore

BatchNormBase = batchnorm._BatchNorm


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the present backward pass has produced its last gradient.

    Call it from a hook of that backward. An exception in `callback` is raised by `backward()`. DDP and FSDP2 end their
    backward in this way; there is no public way.

    Reentrant checkpoints run backwards within the user's backward, and a hook may first be called in an inner one. The
    end of an inner backward means nothing, so the callback moves on to the surrounding one, with that backward's next
    operation. If a checkpoint spans devices, autograd may end it on another device's thread, where no surrounding
    backward is known.
    """
    _EndOfBackward(callback).queue()


class _EndOfBackward:
    """The callback as an object: a nested function would keep itself and its reducer alive until garbage collection."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._waiting: list[Any] = []

    def queue(self, *_: Any) -> None:
        """Have the present backward call this at its end; one of several hooks is enough."""
        for handle in self._waiting:
            handle.remove()
        self._waiting.clear()
        queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
        queue(self)

    def __call__(self) -> None:
        outer: Any = torch._C._current_autograd_node()
        if outer is not None:
            functions = [node for node, _ in outer.next_functions if node is not None]
            self._waiting = [node.register_prehook(self.queue) for node in functions]
        if not self._waiting:  # no backward surrounds this one, or a parameter's hook has called it
            self._callback()


def current_backward() -> int:
    """Return the number of the backward pass that this thread runs; of the innermost one if they are nested."""
    return torch._C._current_graph_task_id()


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target in one call, which saves Python a microsecond or two per tensor."""
    torch._foreach_copy_(targets, sources)


def add_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Add each source to its target; see :func:`copy_all`."""
    torch._foreach_add_(targets, sources)


def sums_of(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensors, each the sum of one from either list; see :func:`copy_all`."""
    return list(torch._foreach_add(some, others))


def is_profiling() -> bool:
    """Return whether torch's profiler is on."""
    return bool(torch._C._autograd._profiler_enabled())


def users_of(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, Python's or torch's own, use a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def changes(tensor: torch.Tensor) -> int:
    """Return a number that grows whenever the tensor is written in place, though not by a change through ``.data``."""
    return tensor._version


def hooks_of(param: torch.Tensor) -> dict[int, object]:
    """Return the functions that run after each gradient of a parameter, by their handles' ids, in order."""
    return param._post_accumulate_grad_hooks or {}


def next_hook_id() -> int:
    """Return the id that the next hook of this process gets, whatever it is registered for."""
    return torch.utils.hooks.RemovableHandle.next_id


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that tensors share exactly if they share memory, while they live; it also works without memory."""
    return int(tensor.untyped_storage()._cdata)


def local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a DTensor; None for other tensors."""
    return getattr(tensor, "_local_tensor", None)


def with_local_part(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return the DTensor with another local part, which may be on a device outside its mesh, as in a checkpoint."""
    names, meta = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names} | {"_local_tensor": local}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, meta, tensor.shape, tensor.stride())
    return made


def children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module | None]]:
    """Return a module's children by name. One with two names appears twice, unlike in ``named_children``."""
    return list(module._modules.items())


def with_versions(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return a state_dict that `module` loads as its own, with the versions of its parts if it knows them."""
    loaded = OrderedDict(state)
    if (versions := getattr(module.state_dict(), "_metadata", None)) is not None:
        loaded._metadata = versions  # type: ignore[attr-defined]
    return loaded


def default_group_store() -> Store:
    """Return the store over which the default process group was initialised."""
    assert dist.is_initialized()
    return distributed_c10d._get_default_store()


def cuda_backend(group: dist.ProcessGroup) -> Any:
    """Return the backend for a group's CUDA tensors: a ``ProcessGroupNCCL``, if the group has NCCL."""
    return group._get_backend(torch.device("cuda"))


@contextmanager
def nccl_calls_together(backend: Any) -> Iterator[None]:
    """Run the context between NCCL's group calls, if the backend has them; torch's newer NCCL backends do not."""
    if not hasattr(backend, "_group_start"):
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


def forget_names() -> None:
    """Restart the numbers of process groups, after the default one could not be made.

    torch numbers groups, and prefixes the keys at which ranks meet with the number. It also counts groups that could
    not be made, and restarts only when a default group is destroyed. So if one rank has failed to make a group and
    another has not, they would wait for each other at different keys forever.
    """
    distributed_c10d._world.group_count = 0


def process_groups() -> list[Any]:
    """Return all process groups of this process, with their stores."""
    return list(distributed_c10d._world.pg_map.items())


def process_group(
    name: str,
    ranks: Sequence[int],
    store: Store,
    timeout: timedelta,
    gloo_threads: int | None = None,
    devices: Callable[[], list[Any]] | None = None,
) -> dist.ProcessGroup:
    """Make a process group of some ranks of the world without the others.

    ``dist.new_group(use_local_synchronization=True)`` is meant for this. But it names the group after a count of
    groups, on which ranks in different sets disagree, so each would wait at keys of its own.

    Args:
        name: The same on all of these ranks, and not in use for another group.
        ranks: Numbers in the world; each of these ranks must call this.
        store: A key-value store that they can all reach.
        timeout: The timeout of its collectives.
        gloo_threads: None for the backends of the default group; otherwise only Gloo, with this number of threads.
        devices: Returns Gloo's devices, if Gloo is used; None for :func:`gloo_devices`.
    """
    backend, _ = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()]
    options = None
    if gloo_threads is not None or backend == "gloo":
        backend, options = _our_gloo(), dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = gloo_threads or _GLOO_THREADS
        options._timeout = timeout
        options._devices = (devices or gloo_devices)()
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        distributed_c10d.Backend(backend),
        store,
        name,  # type: ignore[arg-type] # a NewType of str in new releases
        options,
        timeout=timeout,
    )
    # As new_group does it: for each rank of the world, its rank in the group.
    distributed_c10d._world.pg_group_ranks[group] = {rank: group_rank for group_rank, rank in enumerate(ranks)}
    return group


_GLOO_THREADS = 2
"""torch's own choice."""


def gloo_devices() -> list[Any]:
    """Make devices as torch does for a group without options: of the interfaces that GLOO_SOCKET_IFNAME names."""
    make = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in names.split(",")]


class _AllAtOnce(Store):
    """The store for a Gloo group that is being made: it returns the addresses of all ranks in one answer.

    Gloo itself would ask for them one by one, twice: n² questions for n ranks, all of which one thread answers.
    """

    def __init__(self, store: Store, size: int) -> None:
        super().__init__()
        self._store, self._size = store, size
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        for key in keys:
            if key not in self._found:
                head, _, last = key.rpartition("/")
                every = [f"{head}/{rank}" for rank in range(self._size)] if last.isdigit() else [key]
                self._store.wait(every, timeout)
                self._found |= zip(every, self._store.multi_get(every), strict=True)

    def get(self, key: str) -> bytes:
        found = self._found.get(key)
        return self._store.get(key) if found is None else found


@functools.cache
def _our_gloo() -> str:
    """Register Gloo as a backend that obeys our options, and return its name; torch's own "gloo" ignores them."""

    def create(about: Any, options: Any) -> Any:
        # Pairs that connect lazily ask for addresses later, one at a time.
        lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
        store = about.store if lazy else _AllAtOnce(about.store, about.group_size)
        made = dist.ProcessGroupGloo(store, about.group_rank, about.group_size, options)
        made._set_sequence_number_for_group()
        return made

    name = "gloo_of_spark_hvd"
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    return name


@contextmanager
def sharded_objects_by(broadcast: Callable[[Any, int], Any], allgather: Callable[[Any], list[Any]]) -> Iterator[None]:
    """Let ``torch.distributed.checkpoint`` exchange plans and metadata through these functions, in this thread.

    Its own functions unpickle whatever arrives, and there is no public way to replace them.
    """
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.utils import _DistWrapper

    class Wrapper(_DistWrapper):
        def broadcast_object(self, object: Any) -> Any:
            return broadcast(object, self.global_coordinator_rank) if self.use_dist else object

        def gather_object(self, object: Any) -> list[Any] | None:
            gathered = self.all_gather_object(object)
            return gathered if self.is_coordinator else None

        def all_gather_object(self, object: Any) -> list[Any]:
            return allgather(object) if self.use_dist else [object]

        def scatter_object(self, object_list: list[Any] | None) -> Any:
            gathered = self.broadcast_object(object_list)
            return gathered[self.rank]

    users: list[Any] = [state_dict_loader, state_dict_saver]
    thread = threading.get_ident()
    before = [user._DistWrapper for user in users]

    def ours_in_this_thread(theirs: Any) -> Callable[..., Any]:
        return lambda *args, **options: (Wrapper if threading.get_ident() == thread else theirs)(*args, **options)

    for user, theirs in zip(users, before, strict=True):
        user._DistWrapper = ours_in_this_thread(theirs)
    try:
        yield
    finally:
        for user, theirs in zip(users, before, strict=True):
            user._DistWrapper = theirs


def sharded_writer(store: FileStore, path: str) -> Any:
    """Return a writer of a rank's part of a sharded checkpoint, into a directory of a store."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if store.is_local:
        return FileSystemWriter(path)
    # Without sync_files=False it would sync the host's disks, on which nothing of the checkpoint lies.
    return _in_store(FileSystemWriter(path, sync_files=False), store, path)


def sharded_reader(store: FileStore, path: str) -> Any:
    """Return a reader of the parts of a sharded checkpoint in a directory of a store."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(path)
    return reader if store.is_local else _in_store(reader, store, path)


def _in_store(user: Any, store: FileStore, path: str) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

    user.fs = FileSystem()
    user.fs.fs = store.filesystem  # FsspecWriter makes one of its own, and older ones take no options for it
    user.path = path
    return user
