"""Saves and loads the state of a training function: all of it on rank 0, or a shard on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_hvd.checkpoint import background
from spark_hvd.checkpoint import sharded as checkpoint_sharded
from spark_hvd.checkpoint.background import SaveHandle, settle, start_saving
from spark_hvd.checkpoint.folder import ONE_FILE, SHARDED, Folder, check_step, store_of
from spark_hvd.checkpoint.format import Found, check_state, read, read_by_rank_0, write
from spark_hvd.context.basics import rank
from spark_hvd.context.local import require_no_tables
from spark_hvd.world.activity import activity

if TYPE_CHECKING:
    from spark_hvd.store import Store

_CONTENT = {"step": int, "state": dict}
"""The keys of a checkpoint's file, with their types."""

__all__ = ["Checkpoint", "SaveHandle", "latest", "load", "load_sharded", "save", "save_sharded"]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        step: The number of the checkpoint.
        state: The saved state; tensors are on the CPU.
    """

    __module__ = "spark_hvd.checkpoint"

    step: int
    state: dict[str, Any]


def save(
    where: Store | str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int | None = 2,
    wait: bool = True,
) -> SaveHandle:
    """Write a checkpoint on rank 0. Other ranks do nothing, so either all ranks or rank 0 alone may call it.

    The file gets its name only when it is complete. A process killed meanwhile leaves earlier checkpoints intact, and
    in a local folder, an unfinished file that the next save deletes.

    With ``wait=False``, all ranks must call it. Rank 0 copies the state and continues, and a thread writes the copy.
    Only one save runs at a time: the next one waits for it, as do :func:`load` and the end of the program. If the save
    failed, they raise its error on all ranks. The next save raises it before it saves anything, so you may call it
    again.

    Args:
        where: A folder that rank 0 can reach from any host: a path on shared storage, a URL such as
            "s3://bucket/run-7", or a Store with options. Only one run at a time may use it.
        state: Tensors, numbers, text, and dicts and lists of them, such as a ``state_dict()``. Loading it runs no code.
        step: The checkpoint's number, from 0, such as the number of steps, batches or epochs done.
        keep: How many checkpoints to keep, including this one. Older ones are deleted once this one is complete. None
            keeps all. With 1, there is no older one to fall back on.
        wait: Whether to return only when the file is written. If not, rank 0 needs memory for a second copy of the
            state.

    Returns:
        A handle that tells when the checkpoint is written, and waits for it; with ``wait=True`` it is done.

    Raises:
        TypeError, ValueError: ``state`` holds something else, such as one rank's rows of a ShardedEmbedding, or an
            argument is wrong.
        StoreError: The checkpoint cannot be written, or, with ``wait=False``, the previous one could not be written.
        CollectiveError: With ``wait=False``, a peer or the network failed.
    """
    check_step(step, keep)
    require_no_tables(state, "save")
    if wait:
        background.finish()
    else:
        settle()
    if rank() != 0:
        return SaveHandle(None, settled=True) if wait else start_saving(None)
    folder = Folder(store_of(where), ONE_FILE)
    content = {"step": step, "state": dict(state)}

    def put(content: Mapping[str, Any]) -> None:
        folder.store.sweep(folder.store.url)
        write(folder.store, folder.path(step), content)
        for old in folder.superseded(step, keep):
            folder.store.delete(folder.path(old))

    if wait:
        put(content)
        activity.keep_steps()
        return SaveHandle(None, settled=True)
    check_state(content)
    return start_saving(background.start(folder.path(step), content, put))


def load(where: Store | str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """Read the newest checkpoint written by :func:`save`, the same on all ranks.

    Collective: rank 0 reads it and sends it to the others. Without a world, as on a driver, it only reads. A damaged
    checkpoint is skipped with a warning, and the previous one is read.

    Args:
        where: As in :func:`save`.
        step: Read this checkpoint only.

    Returns:
        The checkpoint, or None if there is none yet.

    Raises:
        StoreError: The store cannot be read, or a save in the background failed. Raised on every rank.
        CheckpointError: All checkpoints are damaged, or `step` is damaged or missing, or a newer spark_hvd wrote it.
    """
    check_step(step)
    settle()

    def newest() -> Found | None:
        folder = Folder(store_of(where), ONE_FILE)
        return folder.newest(
            step, lambda each: read(folder.store, folder.path(each), "Delete it to continue without it", _CONTENT)
        )

    saved = read_by_rank_0(newest)
    return None if saved is None else Checkpoint(saved["step"], saved["state"])


def latest(where: Store | str | os.PathLike[str]) -> int | None:
    """Return the number of the newest checkpoint, including sharded ones; None if there is none.

    Every rank looks by itself. A rank that is still writing finishes first. Only :func:`load` checks whether the
    checkpoint can be read.

    Raises:
        StoreError: The store cannot be read, or, on rank 0, a save in the background failed.
    """
    background.finish()
    store = store_of(where)
    return max([*Folder(store, ONE_FILE).steps(), *Folder(store, SHARDED).steps()], default=None)


def save_sharded(
    where: Store | str | os.PathLike[str],
    model: Any,
    optimizers: Any = (),
    state: Mapping[str, Any] | None = None,
    *,
    step: int,
    keep: int | None = 2,
    wait: bool = True,
) -> SaveHandle:
    """Write a checkpoint of FSDP2 modules and DTensors; each rank writes its part. Collective.

    ``torch.distributed.checkpoint`` writes the parts. A manifest, written last, completes the checkpoint.

    Args:
        where: A folder that every rank can reach; see :func:`save`.
        model: The module, sharded or not.
        optimizers: An optimizer of its parameters, or several.
        state: Other state, the same on all ranks: tensors and plain data, as in :func:`save`.
        step: The checkpoint's number, from 0.
        keep: How many sharded checkpoints to keep; None for all.
        wait: Whether to return only when the files are written; see :func:`save`. If not, each rank needs memory for a
            second copy of its part.

    Returns:
        A handle that tells when the checkpoint is written, and waits for it; with ``wait=True`` it is done.

    Raises:
        TypeError, ValueError: An argument is wrong.
        StoreError: The checkpoint cannot be written, or, with ``wait=False``, the previous one could not be
            written. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    check_step(step, keep)
    settle()
    return checkpoint_sharded.save(store_of(where), model, optimizers, dict(state or {}), step, keep, wait)


def load_sharded(
    where: Store | str | os.PathLike[str], model: Any, optimizers: Any = (), *, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint of :func:`save_sharded` into a model and its optimizers. Collective.

    The number of ranks and the sharding of the model may differ from those at saving. A checkpoint whose files are
    missing or truncated is skipped with a warning.

    ``torch.distributed.checkpoint`` unpickles part of it: only load what you trust.

    Args:
        where: As in :func:`save_sharded`.
        model: The module to load the weights into, in place.
        optimizers: The optimizers to load, in place; the same as at saving.
        step: Read this checkpoint only.

    Returns:
        Its number and ``state``, or None if there is no checkpoint yet.

    Raises:
        StoreError: The store cannot be read.
        CheckpointError: No checkpoint can be used, or it does not match the model.
    """
    check_step(step)
    settle()
    found = checkpoint_sharded.load(store_of(where), model, optimizers, step)
    return None if found is None else Checkpoint(*found)
