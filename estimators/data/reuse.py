"""Whether data were materialised before: what a DataFrame reads, as a fingerprint, and the life of what was written.

A fingerprint is of the plan and of what the plan reads, not of the DataFrame object. Files count with their present
length and time of modification. What is not understood for certain has no fingerprint, and is written anew each time.

What lies in ``<store>/intermediate_data``:

* data that this process wrote are found again by this process only, and deleted when it ends normally;
* data of processes that were killed are deleted by the next fit with the same store, once unused for 7 days;
* ``clear_materialized_data(store)`` deletes all of it at once.

A lease is a file beside the data with the time of its last renewal. A clean-up may look at it just when a fit takes the
data up, so both go in an order that any store with consistent reads keeps. Who uses data renews the lease first and
looks for the manifest then; a clean-up takes the manifest away first and looks at the lease once more then. So either
the clean-up sees the new lease and leaves the files, or the fit sees no manifest and writes anew, in a directory that
the clean-up had not seen.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MANIFEST = "_spark_hvd.json"
USED = "_used"
DAYS = 7.0
RENEW_SECONDS = 3600.0

_log = logging.getLogger(__name__)
clock = time.time


def renew(store: Store, key: str) -> None:
    """Say that the data under ``key`` are in use now.

    Raises:
        StoreError: The store cannot be written.
    """
    store.write_bytes(f"{store.data_path(key)}/{USED}", repr(clock()).encode())


@contextlib.contextmanager
def leased(store: Store, key: str) -> Iterator[None]:
    """Renew the lease now, and again and again until the end of the block.

    Raises:
        StoreError: The store cannot be written now. Later that is a warning.
    """
    renew(store, key)
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                renew(store, key)
            except StoreError as error:
                _log.warning("%s. Data of a training that goes on are deleted when that lasts %g days", error, DAYS)

    thread = threading.Thread(target=go_on, name="spark_hvd-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)  # seconds; a store that answers no more must not keep a fit


def in_use(store: Store, data: DatasetMeta) -> contextlib.AbstractContextManager[None]:
    """Keep what :func:`materialize` wrote from being cleaned up during the block.

    Raises:
        StoreError: The store cannot be written now.
    """
    key = posixpath.basename(posixpath.dirname(posixpath.dirname(data.url)))  # <key>/<name>/<split>
    return leased(store, key)


def delete_unused(store: Store, days: float = DAYS) -> None:
    """Delete what processes left that were killed, if nothing has used it for ``days``. Errors are logged only."""
    try:
        found = store.list(store.join("intermediate_data"))
    except StoreError as error:
        _log.debug("nothing is cleaned up: %s", error)
        return
    for path in found:
        try:
            _delete_unless_used(store, posixpath.basename(path), days)
        except (StoreError, ValueError) as error:  # not ours, or another process deletes it too
            _log.debug("%s is left as it is: %s", path, error)


def roots_of(store: Store, key: str) -> list[str]:
    """Return the directories that hold something of ``key``: the first with manifest and lease."""
    return [store.data_path(key), *(f"{root}/{key}" for root in (store.train_path, store.val_path) if root)]


def _delete_unless_used(store: Store, key: str, days: float) -> None:
    home, *others = roots_of(store, key)
    written = [path for root in (home, *others) for path in store.list(root)]
    manifest, lease = f"{home}/{MANIFEST}", f"{home}/{USED}"
    renewed = store.read_bytes(lease)
    if clock() - float(renewed) <= days * 86400:
        return
    store.delete(manifest)
    if store.read_bytes(lease) != renewed:
        return
    for path in written:
        if path != lease:
            store.delete(path)
    store.delete(lease)  # last: what has none is nobody's, and stays
    for root in (home, *others):
        if store.is_local:  # others have no call that spares what came in the meantime, and many no directories
            with contextlib.suppress(OSError):
                os.rmdir(root)


FORMAT = 1
"""Version of the files and of the manifest; another one is never read."""

_process = uuid.uuid4().hex
_locks: dict[str, threading.Lock] = {}
_mine: dict[tuple[str, str], tuple[Store, int]] = {}
_guard = threading.Lock()


# -- what a DataFrame reads


def fingerprint(df: DataFrame) -> str | None:
    """Return what ``df`` computes and from which data; None if that is not certain.

    Two DataFrames with one fingerprint have the same rows. The other way round nothing follows: what was made by
    ``createDataFrame`` or is cached has the same fingerprint only as long as it is the same object. Nothing is computed
    of it; the directories of its files are listed.
    """
    if not spark_private.has_plan(df):
        return None
    try:
        parts = spark_private.reads(df)
    except Exception as error:  # whatever a plan that Spark or a plugin made in another way answers
        lost = "Fits write their data anew each time, also where the DataFrame reads what it did before."
        spark_private.does_not_tell(df.sparkSession, "what a DataFrame reads", lost, error)
        return None
    return None if parts is None else _digest([df.sparkSession.sparkContext.applicationId, *parts])


def key_of(found: str | None, extra: Sequence[Any]) -> str:
    """Name of the directory for data: the same for the same data written in the same way, else never the same.

    ``extra`` is all else that decides what the files hold: values whose repr tells them apart.
    """
    return _digest([FORMAT, found or uuid.uuid4().hex, _process, [repr(value) for value in extra]])


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


# -- what was written, and for how long it stays


def directories_of(store: Store, key: str) -> dict[str, str]:
    """Return new directories for the files of ``key``, by split; other ones at each call."""
    roots = {"train": store.train_path, "validation": store.val_path}
    name = uuid.uuid4().hex[:8]
    return {
        split: f"{f'{root}/{key}' if root else store.data_path(key)}/{name}/{split}" for split, root in roots.items()
    }


@contextlib.contextmanager
def using(store: Store, key: str) -> Iterator[None]:
    """Hold the data of ``key`` for looking or writing: one thread at a time, and with a lease.

    Raises:
        StoreError: The store cannot be written.
    """
    path = store.data_path(key)
    with _guard:
        lock = _locks.setdefault(path, threading.Lock())
    with lock, leased(store, key):
        with _guard:  # only now: where not even the lease could be written there is nothing to delete
            if not _mine:
                atexit.register(_delete_mine)
            _mine[store.url, key] = (store, os.getpid())
        yield


def read_manifest(store: Store, key: str) -> dict[str, Any] | None:
    """Return the manifest of the data under ``key`` if it exists and all its files do, with their sizes.

    Its keys: format, sizes (path -> bytes), train, validation (``DatasetMeta`` as JSON, or None).
    """
    try:
        manifest = json.loads(store.read_bytes(f"{store.data_path(key)}/{MANIFEST}"))
        if manifest["format"] == FORMAT and _sizes(store, manifest["sizes"]) == manifest["sizes"]:
            return dict(manifest)
    except (StoreError, ValueError, KeyError, TypeError) as error:
        _log.debug("no data to use again under %s: %s", key, error)
    return None


def write_manifest(store: Store, key: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest; from here on the data exist.

    Raises:
        StoreError: It cannot be written.
    """
    content = json.dumps({"format": FORMAT, **manifest}).encode()
    store.write_bytes(f"{store.data_path(key)}/{MANIFEST}", content)


def clear_materialized_data(store: Store) -> None:
    """Delete all data that fits have materialised in ``store``.

    No fit that reads them may be running. Checkpoints, logs and your own data stay.

    Raises:
        StoreError: A file cannot be deleted.
    """
    for path in store.list(store.join("intermediate_data")):
        if store.exists(f"{path}/{USED}"):
            _delete(store, posixpath.basename(path))


def _delete(store: Store, key: str) -> None:
    for root in reversed(roots_of(store, key)):
        store.delete(root)


def _delete_mine() -> None:
    for (_, key), (store, process) in _mine.items():
        if process == os.getpid():  # a fork has the list too, but its end is not ours
            try:
                _delete(store, key)
            except Exception as error:  # nobody is left to catch it
                _log.warning(
                    "data stay in %s: %s. A later fit deletes them, or clear_materialized_data(store) does.",
                    store.data_path(key),
                    error,
                )


def _sizes(store: Store, paths: Iterable[str]) -> dict[str, int]:
    names = list(paths)
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(names, pool.map(store.size, names), strict=True))
