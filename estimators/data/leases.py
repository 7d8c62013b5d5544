"""Leases on materialised data: who uses some says so every hour, and what nobody renewed for days is cleaned up.

A lease is a file beside the data with the time of its last renewal. A clean-up may look at it just when a fit takes the
data up, so both go in an order that any store with consistent reads keeps. Who uses data renews the lease first and
looks for the manifest then; a clean-up takes the manifest away first and looks at the lease once more then. So either
the clean-up sees the new lease and leaves the files, or the fit sees no manifest and writes anew, in a directory that
the clean-up had not seen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import threading
import time
from collections.abc import Iterator

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

MANIFEST = "_spark_hvd.json"
USED = "_used"
DAYS = 7.0
RENEW_SECONDS = 3600.0

_log = logging.getLogger(__name__)
clock = time.time


def renew(store: Store, key: str) -> None:
    """Say that the data under ``key`` are in use now.

    Raises:
        StoreError: the store cannot be written.
    """
    store.write_bytes(f"{store.data_path(key)}/{USED}", repr(clock()).encode())


@contextlib.contextmanager
def leased(store: Store, key: str) -> Iterator[None]:
    """Renew the lease now, and again and again until the end of the block.

    Raises:
        StoreError: the store cannot be written now. Later that is a warning.
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
        StoreError: the store cannot be written now.
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
    """The directories that have something of ``key``: the first with manifest and lease."""
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
