"""Saving and loading the state of a training function: whole on rank 0, or a shard on each rank."""

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
from spark_hvd.context.local import require_no_tables
from spark_hvd.context.who import rank
from spark_hvd.world.activity import activity

if TYPE_CHECKING:
    from spark_hvd.store import Store

_PARTS = {"step": int, "state": dict}

__all__ = ["Checkpoint", "SaveHandle", "latest", "load", "load_sharded", "save", "save_sharded"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        step: The number under which it was saved.
        state: What was saved; tensors are on the CPU.
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
    """Write a checkpoint, on rank 0; on other ranks nothing happens, so that all ranks may call it or rank 0 alone.

    The file has its name only when it is complete: whoever is killed meanwhile leaves the former ones whole, and in a
    local folder a file that the next save there deletes.

    With ``wait=False`` rank 0 copies the state and goes on; a thread writes the copy. All ranks must call it then.
    One save is under way at a time: the next one waits for it first, as do :func:`load` and the end of the program. If
    it failed, that is raised there, on all ranks; by the next save before it saves, so that it may be called again.

    Args:
        where: A folder that rank 0 reaches wherever it is started: a path on shared storage, a URL such as
            "s3://bucket/run-7", or a Store, for its options. One run uses it at a time.
        state: Tensors, numbers, text, and dicts and lists of them: ``state_dict()`` of what is trained. Loading it runs
            no code.
        step: Its number, from 0: steps, batches or epochs done.
        keep: How many checkpoints to keep, this one included; older ones are deleted, once this one is whole. None for
            all. With 1 there is none to fall back on.
        wait: Whether to return only when it is written. If not, rank 0 needs memory for a second copy of the state.

    Returns:
        What tells when it is written, and waits for that; done with ``wait=True``.

    Raises:
        TypeError, ValueError: ``state`` has something else in it, such as one rank's rows of a ShardedEmbedding, or an
            argument is wrong.
        StoreError: it cannot be written, or, with ``wait=False``, the one before could not be.
        CollectiveError: with ``wait=False``, a peer or the network failed.
    """
    check_step(step, keep)
    require_no_tables(state, "save")
    if wait:
        background.finish()
    else:
        settle()
    activity.keep_steps()
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
        return SaveHandle(None, settled=True)
    check_state(content)
    return start_saving(background.start(folder.path(step), content, put))


def load(where: Store | str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """Read the newest checkpoint that :func:`save` has written, on all ranks alike.

    To be called by all ranks: rank 0 reads, and the others get it from there. Without a world, as on a driver, it just
    reads. A damaged one is left out with a warning, and the one before is read.

    Args:
        where: As in :func:`save`.
        step: Read this one and no other.

    Returns:
        The checkpoint; None where there is none yet.

    Raises:
        StoreError: the store cannot be read, or what was saved in the background could not be written. Raised on every
            rank.
        CheckpointError: all are damaged, or the one asked for is damaged or missing, or a newer spark_hvd wrote it.
    """
    check_step(step)
    settle()

    def newest() -> Found | None:
        folder = Folder(store_of(where), ONE_FILE)
        return folder.newest(
            step, lambda each: read(folder.store, folder.path(each), "Delete it to do without it", _PARTS)
        )

    saved = read_by_rank_0(newest)
    return None if saved is None else Checkpoint(saved["step"], saved["state"])


def latest(where: Store | str | os.PathLike[str]) -> int | None:
    """The number of the newest checkpoint, sharded ones included; None where there is none.

    Every rank looks by itself, a rank that writes when that is done. Whether it can be read only :func:`load` says.

    Raises:
        StoreError: the store cannot be read, or, on rank 0, what was saved in the background could not be written.
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
    """Write a checkpoint of which each rank writes its part: for FSDP2 and DTensor. To be called by all ranks.

    ``torch.distributed.checkpoint`` writes the parts; a manifest, written last, makes them a checkpoint.

    Args:
        where: A folder that every rank reaches; see :func:`save`.
        model: The module, sharded or not.
        optimizers: An optimizer of its parameters, or several.
        state: What is the same on all ranks besides: tensors and plain data, as in :func:`save`.
        step: Its number, from 0.
        keep: How many sharded checkpoints to keep; None for all.
        wait: Whether to return only when it is written; see :func:`save`. If not, each rank needs memory for a second
            copy of its part.

    Returns:
        What tells when it is written, and waits for that; done with ``wait=True``.

    Raises:
        TypeError, ValueError: an argument is wrong.
        StoreError: it cannot be written, or, with ``wait=False``, what was saved before could not be. Raised on every
            rank.
        CollectiveError: a peer or the network failed.
    """
    check_step(step, keep)
    settle()
    activity.keep_steps()
    return checkpoint_sharded.save(store_of(where), model, optimizers, dict(state or {}), step, keep, wait)


def load_sharded(
    where: Store | str | os.PathLike[str], model: Any, optimizers: Any = (), *, step: int | None = None
) -> Checkpoint | None:
    """Load the newest checkpoint of :func:`save_sharded` into a model and its optimizers. To be called by all ranks.

    The number of ranks, and how the model is sharded, may differ from those at saving. A checkpoint whose files are
    missing or cut is left out with a warning.

    ``torch.distributed.checkpoint`` unpickles part of it: only load what you trust.

    Args:
        where: As in :func:`save_sharded`.
        model: Gets the weights, in place.
        optimizers: Get their state, in place; the same as at saving.
        step: Read this one and no other.

    Returns:
        Its number and ``state``; None where there is none yet.

    Raises:
        StoreError: the store cannot be read.
        CheckpointError: none can be used, or it does not fit the model.
    """
    check_step(step)
    settle()
    found = checkpoint_sharded.load(store_of(where), model, optimizers, step)
    return None if found is None else Checkpoint(*found)
