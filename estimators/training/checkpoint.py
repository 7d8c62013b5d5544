"""Checkpoints of a run: written atomically, by one fit at a time, and verified when read.

A file in the run's folder names the fit that writes there: the one that began last. A fit begins when its ranks have
made all their checks. It reads the file after each epoch, before each save, and again before a new file replaces the
former one, and fails once another fit has begun. So two programs cannot write one run's checkpoints in turn, nor can
ranks that have outlived their program, or that were stopped for long. If a program was killed, the next one need not
wait. The file is no lock: a rename or an upload that is under way when another fit begins still ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from spark_hvd.checkpoint import background
from spark_hvd.checkpoint.format import Found, check_state, read, read_by_rank_0, write
from spark_hvd.store import Store
from spark_hvd.store.errors import CheckpointError, StoreError

LAST = "last.ckpt"
BEST = "best.ckpt"
TRAINED = "trained.ckpt"
"""The weights that callbacks and the framework left at the end of a fit, if they differ from the last epoch's."""
_OWNER = "owner"


def of_epoch(epoch: int) -> str:
    """Return the name of the checkpoint of an epoch, counted from 1."""
    return f"epoch-{epoch}.ckpt"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        fit: Identifies the fit that writes them; None if no other process can.
    """

    store: Store
    run_id: str
    fit: str | None = None

    def exists(self, name: str = LAST) -> bool:
        """Return whether a checkpoint exists."""
        return self.store.exists(self.store.checkpoint_path(self.run_id, name))

    def version(self) -> str | None:
        """Return a text that differs for each checkpoint written; None if there is none."""
        return self.store.version(self.store.checkpoint_path(self.run_id, LAST))

    def owner(self) -> str | None:
        """Return the fit that has claimed the checkpoints; None if there is none, or no other process can."""
        path = self.store.checkpoint_path(self.run_id, _OWNER)
        return self.store.read_bytes(path).decode() if self.fit is not None and self.store.exists(path) else None

    @property
    def is_owner(self) -> bool:
        """Whether this fit has claimed the checkpoints, and no other one has since."""
        return self.owner() == self.fit

    def claim(self) -> None:
        """Make this fit the one that writes the checkpoints; from now on, saves of others fail.

        Raises:
            StoreError: The store cannot be written.
        """
        if self.fit is not None:
            self.store.write_bytes(self.store.checkpoint_path(self.run_id, _OWNER), self.fit.encode())

    def check_owner(self, former: str | None = None) -> None:
        """Check that no fit but this one, or a ``former`` one, has claimed the checkpoints.

        Raises:
            StoreError: Another fit has, or the store cannot be read.
        """
        if self.owner() not in (None, former, self.fit):
            raise StoreError(
                f"run_id={self.run_id!r}: another fit has begun to train this run, and writes its checkpoints to "
                f"{self.store.run_path(self.run_id)}. Expected one fit at a time, so this one ends. Wait for the other "
                "one, or pass another run_id"
            )

    def save(self, states: Mapping[str, Mapping[str, Any]], superseded: Callable[[], Iterable[str]] = tuple) -> None:
        """Copy states, and write them one after the other while training continues; one such save at a time.

        States hold dicts, lists, numbers, text and tensors. ``superseded`` returns what to delete once they are
        written.

        Raises:
            TypeError: A state holds something else.
            StoreError: The previous states could not be written, or another fit writes this run's; earlier ones are
                intact.
        """
        background.finish()
        for state in states.values():
            check_state(state)

        def put(copies: Mapping[str, Mapping[str, Any]]) -> None:
            self.check_owner()
            self.store.sweep(self.store.run_path(self.run_id))  # left behind by a killed save
            for name, state in copies.items():
                write(self.store, self.store.checkpoint_path(self.run_id, name), state, self.check_owner)
            with suppress(StoreError):  # what remains is deleted with the next ones, or at the end
                for name in superseded():
                    self.discard(name)

        background.start(self.store.checkpoint_path(self.run_id), states, put)

    def discard(self, name: str) -> None:
        """Delete a checkpoint, if it exists."""
        path = self.store.checkpoint_path(self.run_id, name)
        if self.store.exists(path):
            self.store.delete(path)

    def finish(self) -> None:
        """Wait until the saved states are written.

        Raises:
            StoreError: They could not be written; earlier ones are intact.
        """
        background.finish()

    def load(self, name: str = LAST) -> dict[str, Any]:
        """Read a checkpoint onto the CPU, without running code; on ranks, rank 0 reads for all.

        Raises:
            StoreError: It cannot be read.
            CheckpointError: It is damaged, or a newer version wrote it.
        """
        state = read_by_rank_0(lambda: self.read(name))
        assert state is not None
        return state

    def trained(self, best: bool) -> dict[str, Any]:
        """Read the checkpoint of the trained model, on this rank only.

        This is the best one if that is wanted and exists; otherwise the one with the weights at the end of the fit, or
        that of the last epoch.

        Raises:
            StoreError, CheckpointError: see :meth:`load`.
        """
        names = [BEST, TRAINED] if best else [TRAINED]
        return self.read(next(filter(self.exists, names), LAST)).state

    def read(self, name: str) -> Found:
        """Read a checkpoint with everything in its file.

        Raises:
            StoreError, CheckpointError: see :meth:`load`.
        """
        otherwise = f"Delete it to train run_id={self.run_id!r} from the start, or pass another run_id"
        return read(self.store, self.store.checkpoint_path(self.run_id, name), otherwise)


def check_fits(
    state: Mapping[str, Any], model: torch.nn.Module, run_id: str, derived: Mapping[str, Any] | None = None
) -> None:
    """Check that a checkpoint's weights belong to this model, and to what this fit has ``derived`` from its data.

    Raises:
        CheckpointError: They do not; the text names the difference.
    """
    former = state.get("derived", {})
    for name, value in (derived or {}).items():
        if name in former and former[name] != value:
            raise CheckpointError(
                f"run_id={run_id!r} has a checkpoint for other {name}: {str(former[name])[:200]} then, "
                f"{str(value)[:200]} now. Fit the data with which the run was started, or pass another run_id"
            )
    saved, current = shapes_of(state["model"]), shapes_of(model.state_dict())
    if saved == current:
        return
    differ = [name for name in {**current, **saved} if saved.get(name) != current.get(name)]
    name = differ[0]
    raise CheckpointError(
        f"run_id={run_id!r} has a checkpoint of another model: {len(differ)} of {len(current)} weights differ, first "
        f"{name!r}: {saved.get(name, 'missing')} in the checkpoint, {current.get(name, 'missing')} in the model "
        "given. Pass the model with which the run was started, or another run_id"
    )


def digest_of(weights: Mapping[str, Any]) -> str:
    """Return hex digits that are equal for equal weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in weights.items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            octets: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(octets)
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def shapes_of(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> dtype and shape, as text."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if hasattr(value, "dtype") else "plain"
        for name, value in weights.items()
    }
