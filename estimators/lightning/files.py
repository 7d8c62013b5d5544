"""Files of callbacks and loggers: in a folder of rank 0's host, copied to the store's logs after every epoch."""

from __future__ import annotations

import os
import shutil
from typing import Any

import spark_hvd.torch as hvd
from spark_hvd.scratch import Scratch
from spark_hvd.store import Store
from spark_hvd.store.errors import explaining
from spark_hvd.store.paths import local_below

_FOLDERS = ("dirpath", "_root_dir", "_save_dir")
"""Where ModelCheckpoint, profilers and loggers keep the folder they were given; those of loggers are private."""


class RunFiles:
    """The files of a run; where it is ``resumed``, the store has some already."""

    def __init__(self, store: Store, run_id: str, resumed: bool) -> None:
        self._store, self._logs = store, store.logs_path(run_id)
        self._copied: dict[str, tuple[int, int]] = {}
        self._folder = Scratch("lightning") if hvd.rank() == 0 else None
        root = "" if self._folder is None else self._folder.path
        self.root: str = hvd.broadcast_object(root, root_rank=0, name="spark_hvd.lightning.root")
        if resumed and hvd.rank() == 0:
            try:
                self._fetch()
            except BaseException:
                self.close()
                raise

    def inside(self, path: str, driver_folder: str) -> str:
        """Where the files go that were to go to ``path``: into the folder, unless the path says otherwise.

        Only paths within ``driver_folder``, where loggers make them absolute, were not meant to be elsewhere.
        """
        if "://" in path:
            return path
        name = os.path.relpath(path, driver_folder) if os.path.isabs(path) and driver_folder != "/" else path
        return path if os.path.isabs(name) or name.startswith("..") else os.path.normpath(os.path.join(self.root, name))

    def redirect(self, writer: Any, driver_folder: str) -> None:
        """Let a callback, logger or profiler write into the folder."""
        for name in _FOLDERS:
            value = vars(writer).get(name)
            if isinstance(value, (str, os.PathLike)):
                setattr(writer, name, self.inside(os.fspath(value), driver_folder))
            elif name == "dirpath" and hasattr(writer, "save_top_k"):
                # Not below a logger's folder, which has another name when the run is resumed.
                setattr(writer, name, os.path.join(self.root, "checkpoints"))
        uri = vars(writer).get("_tracking_uri")  # of MLFlowLogger
        if isinstance(uri, str) and uri.startswith("file:") and not uri.startswith("file:/"):
            writer._tracking_uri = f"file:{self.inside(uri.removeprefix('file:'), driver_folder)}"

    def copy(self) -> None:
        """Bring the store up to date, on rank 0; what was deleted here is deleted there."""
        if hvd.rank() != 0:
            return
        found = self._found()
        for name, state in found.items():
            if self._copied.get(name) != state:
                with open(os.path.join(self.root, name), "rb") as source, self._store.writing(self._path(name)) as to:
                    shutil.copyfileobj(source, to, 1 << 20)
        for name in self._copied.keys() - found.keys():
            self._store.delete(self._path(name))
        self._copied = found

    def close(self) -> None:
        """Delete the folder."""
        if self._folder is not None:
            self._folder.close()

    def _fetch(self) -> None:
        """Take up the files of the epochs done: a ModelCheckpoint deletes those that are no longer among the best."""
        inner = self._store.inner_path(self._logs).rstrip("/")
        if not self._store.exists(self._logs):
            return
        with explaining("list", self._logs):
            names = [path[len(inner) + 1 :] for path in self._store.filesystem.find(inner)]
        names = [name for name in names if name and not name.endswith("/")]  # folders, as S3's console makes them
        # all of them are checked before the first is written
        for name, local in [(name, local_below(self.root, name, self._logs)) for name in names]:
            with explaining("read", self._path(name)):
                os.makedirs(os.path.dirname(local), exist_ok=True)
                with self._store.open(self._path(name)) as source, open(local, "wb") as to:
                    shutil.copyfileobj(source, to, 1 << 20)
        self._copied = self._found()

    def _found(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                state = os.stat(path)
                found[os.path.relpath(path, self.root)] = (state.st_mtime_ns, state.st_size)
        return found

    def _path(self, name: str) -> str:
        return f"{self._logs}/{name.replace(os.sep, '/')}"
