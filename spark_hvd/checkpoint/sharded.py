"""Sharded checkpoints: each rank writes its part with ``torch.distributed.checkpoint``, and a manifest commits them.

::

    step-000000000100-1f0c88a2.shards/   the files of torch, in a new directory for each save; state.pt has plain data
    step-000000000100.sharded.json       the manifest: directory, files and their sizes; written last
"""

from __future__ import annotations

import itertools
import json
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_hvd.checkpoint import background
from spark_hvd.checkpoint.background import SaveHandle, start_saving
from spark_hvd.checkpoint.folder import SHARDED, Folder, stem
from spark_hvd.checkpoint.format import (
    FORMAT,
    Found,
    NewerFormatError,
    check_state,
    on_rank_0,
    read,
    read_by_rank_0,
    write,
)
from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.context.basics import size
from spark_hvd.context.local import require_no_tables
from spark_hvd.store.errors import CheckpointError, StoreError
from spark_hvd.store.paths import one_name
from spark_hvd.transport.torch_private import sharded_objects_by, sharded_reader, sharded_writer
from spark_hvd.world.activity import activity

if TYPE_CHECKING:
    from spark_hvd.store import Store

_STATE = "state.pt"
_SHARDS = ".shards"
_SAVING = "spark_hvd.checkpoint.sharded"
_PARTS = {"step": int, "directory": str, "state": dict}


def save(
    store: Store, model: Any, optimizers: Any, state: Mapping[str, Any], step: int, keep: int | None, wait: bool
) -> SaveHandle:
    """See :func:`spark_hvd.checkpoint.save_sharded`."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    require_no_tables(model, "save_sharded")
    folder, ranks = Folder(store, SHARDED), size()

    def put(content: Mapping[str, Any]) -> None:
        def begin() -> str:
            directory = f"{stem(step)}-{uuid.uuid4().hex[:8]}{_SHARDS}"
            write(
                store, store.join(directory, _STATE), {"step": step, "directory": directory, "state": content["state"]}
            )
            return directory

        def commit() -> None:
            files = {path.rpartition("/")[2]: store.size(path) for path in store.list(store.join(directory))}
            manifest = {"format": FORMAT, "step": step, "size": ranks, "directory": directory, "files": files}
            store.write_bytes(folder.path(step), json.dumps(manifest, indent=1).encode())
            _tidy(folder, step, keep)

        directory = on_rank_0(begin, _SAVING)
        with _explaining("write", store.join(directory), StoreError):
            save_parts(content["parts"], storage_writer=sharded_writer(store, store.join(directory)))
        on_rank_0(commit, _SAVING)

    weights, moments = get_state_dict(model, optimizers)
    content = {"state": state, "parts": {"model": weights, "optimizer": moments}}
    if wait:
        put(content)
        activity.keep_steps()
        return SaveHandle(None, settled=True)
    check_state({"state": state})
    return start_saving(background.start(folder.path(step), content, put))


def load(store: Store, model: Any, optimizers: Any, step: int | None) -> tuple[int, dict[str, Any]] | None:
    """See :func:`spark_hvd.checkpoint.load_sharded`. Return the step, and the state that is the same on all ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    def read_step(each: int) -> Found:
        directory = _checked(folder, each)
        found = read(store, store.join(directory, _STATE), "Delete its manifest", _PARTS)
        if found.state["directory"] != directory:
            raise CheckpointError(f"{found.path} is of {found.state['directory']!r}, another checkpoint. Delete it")
        return found

    folder = Folder(store, SHARDED)
    saved = read_by_rank_0(lambda: folder.newest(step, read_step))
    if saved is None:
        return None
    path = store.join(saved["directory"])
    weights, moments = get_state_dict(model, optimizers)
    parts: dict[str, Any] = {"model": weights, "optimizer": moments} if moments else {"model": weights}
    with _explaining("load", path, CheckpointError):
        load_parts(parts, storage_reader=sharded_reader(store, path))
        set_state_dict(model, optimizers, model_state_dict=parts["model"], optim_state_dict=parts.get("optimizer", {}))
    return saved["step"], saved["state"]


def _checked(folder: Folder, step: int) -> str:
    """Return the directory of a checkpoint, after checking that all its files exist and have the right sizes.

    Raises:
        CheckpointError: Files are missing or damaged, or the manifest is damaged or has a newer format.
    """
    store, path = folder.store, folder.path(step)
    data = store.read_bytes(path)
    try:
        manifest = json.loads(data)
        newer = manifest["format"] > FORMAT
        directory, files = one_name("directory", manifest["directory"]), dict(manifest["files"])
        if type(directory) is not str or _STATE not in files:
            raise TypeError(f"expected a directory with {_STATE} in it, not {directory!r} with {', '.join(files)}")
        for name, expected in files.items():
            one_name("files", name)
            if type(expected) is not int:
                raise TypeError(f"the size of {name} is {expected!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the manifest {path} is damaged: {type(error).__name__}: {error}. Delete it") from error
    if newer:
        raise NewerFormatError(f"{path} has format {manifest['format']}, written by a newer spark_hvd: update it")
    for name, expected in files.items():
        file = store.join(directory, name)
        actual = store.size(file) if store.exists(file) else None
        if actual != expected:
            problem = "does not exist" if actual is None else f"has {actual:,} bytes"
            raise CheckpointError(
                f"the checkpoint of {path} is damaged: {file} {problem}, but {expected:,} bytes were written. Delete "
                "its manifest"
            )
    return directory


def _tidy(folder: Folder, step: int, keep: int | None) -> None:
    """Delete superseded checkpoints, and directories of saves that did not end."""
    store = folder.store
    store.sweep(store.url)
    for old in folder.superseded(step, keep):
        store.delete(folder.path(old))  # first, so that a manifest always has its files
    known = set()
    for each in folder.steps():
        try:
            known.add(json.loads(store.read_bytes(folder.path(each)))["directory"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # a manifest is damaged, so it is unknown which directories are in use
    for path in store.list(store.url):
        name = path.rpartition("/")[2]
        if name.endswith(_SHARDS) and name not in known:
            store.delete(path)


@contextmanager
def _explaining(verb: str, path: str, kind: type[StoreError]) -> Iterator[None]:
    """Turn torch's error about a part that cannot be written or read into an error of type ``kind``."""
    from torch.distributed.checkpoint.api import CheckpointException

    # A world of one needs no process group. The filter stays, because a thread cannot remove it for itself alone.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    # Saving may run during the program's own collectives. Those without names are matched by order, so use names here.
    names = (f"{_SAVING}.{number}" for number in itertools.count())
    try:
        with sharded_objects_by(
            lambda obj, root: broadcast_object(obj, root, next(names)), lambda obj: allgather_object(obj, next(names))
        ):
            yield
    except CheckpointException as error:
        number, failure = min(error.failures.items())
        cause = failure[0]
        raise kind(
            f"rank {number} cannot {verb} its part of {path}: {type(cause).__name__}: {cause}. Every rank "
            "must reach the folder, and the model and optimizers must be those of the checkpoint"
        ) from error
