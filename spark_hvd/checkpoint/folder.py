"""A folder of numbered checkpoints: their names, which of them exist, which to load, and which to delete."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_hvd.checkpoint.format import Found, NewerFormatError
from spark_hvd.store.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from spark_hvd.store import Store

_log = logging.getLogger(__name__)
ONE_FILE = "pt"
SHARDED = "sharded.json"
_NAME = re.compile(r"step-(\d+)\.(pt|sharded\.json)")


@dataclass(frozen=True)
class Folder:
    """The checkpoints of one kind, ``ONE_FILE`` or ``SHARDED``, directly below the root of a store."""

    store: Store
    kind: str

    def path(self, step: int) -> str:
        """Return the file of a step; for a sharded checkpoint, its manifest."""
        return self.store.join(f"{stem(step)}.{self.kind}")

    def steps(self) -> list[int]:
        """Return the existing steps in ascending order."""
        names = (path.rpartition("/")[2] for path in self.store.list(self.store.url))
        matches = (match for name in names if (match := _NAME.fullmatch(name)))
        return sorted(int(match[1]) for match in matches if match[2] == self.kind)

    def newest(self, wanted: int | None, read_step: Callable[[int], Found]) -> Found | None:
        """Return the newest checkpoint that is not damaged, and warn of each damaged one; None if there is none yet.

        Args:
            wanted: Only try this step; None for all, newest first.
            read_step: Reads the checkpoint of a step.

        Raises:
            StoreError: A checkpoint cannot be read.
            CheckpointError: All tried checkpoints are damaged, ``wanted`` does not exist, or a newer version wrote one.
        """
        steps = self.steps()
        if wanted is not None and wanted not in steps:
            raise CheckpointError(f"{self.store.url} has no checkpoint of step {wanted}, but {steps or 'none at all'}")
        steps = steps[::-1] if wanted is None else [wanted]
        for step in steps:
            try:
                return read_step(step)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                if step == steps[-1]:
                    raise
                _log.warning("%s. Trying the previous checkpoint", error)
        return None

    def superseded(self, step: int, keep: int | None) -> list[int]:
        """Return the steps to delete after ``step`` was saved. Warn of later steps, which are kept."""
        steps = self.steps()
        if later := [each for each in steps if each > step]:
            _log.warning(
                "%s has checkpoints of later steps than the %d just saved, %s. They are from another run, or this run "
                "went back. load() takes them for newer: delete them, or save to another folder",
                self.store.url,
                step,
                later,
            )
        return [] if keep is None else [each for each in steps if each < step][: -(keep - 1) or None]


def stem(step: int) -> str:
    """Return the common prefix of a step's file names, which sort by step."""
    return f"step-{step:012d}"


def store_of(where: Store | str | os.PathLike[str]) -> Store:
    """Return ``where`` as a store whose root is the folder.

    Raises:
        StoreError: Other processes cannot see the store.
    """
    from spark_hvd.store import Store  # imported here, so that `import spark_hvd.torch` does not load fsspec

    store = where if isinstance(where, Store) else Store.create(where)
    if not store.is_shared:
        raise StoreError(f"cannot use {store.url} for checkpoints: it ends with the process. Use a shared folder")
    return store


def check_step(step: Any, keep: Any = None) -> None:
    """Raise a TypeError or ValueError unless both are whole numbers in their range, or None."""
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: expected a whole number")
        if value < least:
            raise ValueError(f"{name}={value}: expected at least {least}")
