"""Finds data that this process has written before, by the fingerprint of a DataFrame, and deletes unused data.

A fingerprint covers the plan and what the plan reads, not the DataFrame object. Files count with their current length
and modification time. A plan that is not fully understood has no fingerprint, so its data are written anew each time.

The data in ``<store>/intermediate_data`` have the following lifetime:

* Only the process that wrote them finds them again. It deletes them when it ends normally.
* If the process was killed, a later fit with the same store deletes them, once they have been unused for 7 days.
* ``clear_materialized_data(store)`` deletes all of them at once.

A lease is a file beside the data that holds the time of its last renewal. A clean-up may read it at the moment when a
fit starts to use the data. Therefore both act in an order that is safe on any store with consistent reads. A fit first
renews the lease and then looks for the manifest. A clean-up first deletes the manifest and then reads the lease again.
So either the clean-up sees the new lease and keeps the files, or the fit sees no manifest and writes the data anew, to
a directory that the clean-up has not listed.
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
    """Mark the data under ``key`` as in use now.

    Raises:
        StoreError: The store cannot be written.
    """
    store.write_bytes(f"{store.data_path(key)}/{USED}", repr(clock()).encode())


@contextlib.contextmanager
def leased(store: Store, key: str) -> Iterator[None]:
    """Renew the lease now, and once an hour until the end of the block.

    Raises:
        StoreError: The store cannot be written now. Later failures are only logged as warnings.
    """
    renew(store, key)
    ended = threading.Event()

    def keep_renewing() -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                renew(store, key)
            except StoreError as error:
                _log.warning("%s. The data of a running training are deleted if this lasts %g days", error, DAYS)

    thread = threading.Thread(target=keep_renewing, name="spark_hvd-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)  # seconds; a store that no longer answers must not block a fit


def in_use(store: Store, data: DatasetMeta) -> contextlib.AbstractContextManager[None]:
    """Keep what :func:`materialize` wrote from being cleaned up during the block.

    Raises:
        StoreError: The store cannot be written now.
    """
    key = posixpath.basename(posixpath.dirname(posixpath.dirname(data.url)))  # <key>/<name>/<split>
    return leased(store, key)


def delete_unused(store: Store) -> None:
    """Delete data that killed processes left, if unused for ``DAYS``. Errors are only logged."""
    try:
        paths = store.list(store.join("intermediate_data"))
    except StoreError as error:
        _log.debug("unused data are not deleted: %s", error)
        return
    for path in paths:
        try:
            _delete_unless_used(store, posixpath.basename(path))
        except (StoreError, ValueError) as error:  # not ours, or another process deletes it too
            _log.debug("%s is not deleted: %s", path, error)


def roots_of(store: Store, key: str) -> list[str]:
    """Return the directories that hold data of ``key``. The first also holds the manifest and the lease."""
    return [store.data_path(key), *(f"{root}/{key}" for root in (store.train_path, store.val_path) if root)]


def _delete_unless_used(store: Store, key: str) -> None:
    home, *others = roots_of(store, key)
    written = [path for root in (home, *others) for path in store.list(root)]
    manifest, lease = f"{home}/{MANIFEST}", f"{home}/{USED}"
    renewed = store.read_bytes(lease)
    if clock() - float(renewed) <= DAYS * 86400:
        return
    store.delete(manifest)
    if store.read_bytes(lease) != renewed:
        return
    for path in written:
        if path != lease:
            store.delete(path)
    store.delete(lease)  # last, because a directory without a lease is never cleaned up
    for root in (home, *others):
        if store.is_local:  # object stores cannot spare files that were added meanwhile, and need no rmdir
            with contextlib.suppress(OSError):
                os.rmdir(root)


FORMAT = 1
"""Version of the files and of the manifest. Other versions are not read."""

_process = uuid.uuid4().hex
_locks: dict[str, threading.Lock] = {}
_mine: dict[tuple[str, str], tuple[Store, int]] = {}
_guard = threading.Lock()


# -- what a DataFrame reads


def fingerprint(df: DataFrame) -> str | None:
    """Return a digest of what ``df`` computes and of the data that it reads; None if these are not certain.

    DataFrames with the same fingerprint have the same rows. The converse does not hold: the fingerprint of a DataFrame
    that is cached or was made by ``createDataFrame`` is only found again for the same object. No rows are computed, but
    the directories of files are listed.
    """
    if not spark_private.has_plan(df):
        return None
    try:
        parts = spark_private.reads(df)
    except Exception as error:  # a plan of a newer Spark, or of a plugin, may fail in any way
        lost = "Each fit writes its data anew, even if the DataFrame reads the same data as before."
        spark_private.does_not_tell(df.sparkSession, "what a DataFrame reads", lost, error)
        return None
    return None if parts is None else _digest([df.sparkSession.sparkContext.applicationId, *parts])


def key_of(digest: str | None, extra: Sequence[Any]) -> str:
    """Return the name of the directory for data: the same for equal data that are written equally, else a new one.

    ``digest`` is the fingerprint. ``extra`` holds all other values that affect the files; their reprs must differ.
    """
    return _digest([FORMAT, digest or uuid.uuid4().hex, _process, [repr(value) for value in extra]])


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


# -- data that were written


def directories_of(store: Store, key: str) -> dict[str, str]:
    """Return a directory for the files of each split under ``key``, with a new name at each call."""
    roots = {"train": store.train_path, "validation": store.val_path}
    name = uuid.uuid4().hex[:8]
    return {
        split: f"{f'{root}/{key}' if root else store.data_path(key)}/{name}/{split}" for split, root in roots.items()
    }


@contextlib.contextmanager
def using(store: Store, key: str) -> Iterator[None]:
    """Hold a lease for the data of ``key`` in order to find or write them; one thread at a time.

    Raises:
        StoreError: The store cannot be written.
    """
    path = store.data_path(key)
    with _guard:
        lock = _locks.setdefault(path, threading.Lock())
    with lock, leased(store, key):
        with _guard:  # only now: if the lease cannot be written, there is nothing to delete
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
        _log.debug("no data to reuse under %s: %s", key, error)
    return None


def write_manifest(store: Store, key: str, manifest: Mapping[str, Any]) -> None:
    """Write the manifest. From then on, the data exist.

    Raises:
        StoreError: The manifest cannot be written.
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
        if process == os.getpid():  # a forked process inherits the list, but must not delete the data
            try:
                _delete(store, key)
            except Exception as error:  # nothing catches errors at exit
                _log.warning(
                    "data stay in %s: %s. A later fit deletes them, or clear_materialized_data(store) does.",
                    store.data_path(key),
                    error,
                )


def _sizes(store: Store, paths: Iterable[str]) -> dict[str, int]:
    names = list(paths)
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(names, pool.map(store.size, names), strict=True))
