"""An elastic fit whose ranks are all lost at once resumes from its checkpoint, as long as it makes progress."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_hvd.checkpoint.format import write
from spark_hvd.estimators.fit.ranks import _through_losses, only_fit_of
from spark_hvd.estimators.training.checkpoint import LAST, TRAINED, Checkpoints
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.train import Job
from spark_hvd.runner import StateLostError
from spark_hvd.store import Store, StoreError


def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[bytes | None]) -> list[bool]:
    """Return whether each start was told to resume; each saves something, or nothing, and all but the last are lost."""
    store = Store.create(tmp_path)
    checkpoints, starts = Checkpoints(store, "run"), []
    monkeypatch.setattr("spark_hvd.estimators.fit.ranks.replace", lambda spec, **changes: SimpleNamespace(**changes))

    def run(spec: Any) -> str:
        starts.append(spec.resume)
        if len(starts) > len(saves):
            return "trained"
        if (data := saves[len(starts) - 1]) is not None:
            store.write_bytes(store.checkpoint_path("run", LAST), data)
        raise StateLostError("all ranks that had the state are gone", ())

    assert _through_losses(run, SimpleNamespace(resume=False), checkpoints) == "trained"  # type: ignore[arg-type]
    return starts


def test_it_resumes_while_checkpoints_get_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(tmp_path, monkeypatch, [b"epoch 1", b"epoch 2 of more"]) == [False, True, True]


@pytest.mark.parametrize("saves", [[None], [b"epoch 1", None]])
def test_it_ends_without_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[bytes | None]
) -> None:
    with pytest.raises(StateLostError, match="all ranks that had the state are gone"):
        fit(tmp_path, monkeypatch, saves)


def test_a_fit_that_begins_ends_another_one_of_its_run(tmp_path: Path) -> None:
    """They may be in other programs; the earlier one's ranks may have outlived a program that was killed."""
    store = Store.create(tmp_path)
    first, second = (Checkpoints(store, "run", fit) for fit in ("first", "second"))
    first.claim()
    first.save({LAST: {"epoch": 1}})
    first.finish()
    second.check_owner(first.owner())
    second.claim()
    assert second.load()["epoch"] == 1
    second.save({LAST: {"epoch": 2}})
    second.finish()
    first.save({LAST: {"epoch": 3}})
    with pytest.raises(StoreError, match="run_id='run': another fit has begun to train this run"):
        first.finish()
    assert second.load()["epoch"] == 2
    second.check_owner()
    assert (first.is_owner, second.is_owner) == (False, True)
    with pytest.raises(StoreError, match="another fit"):
        first.check_owner("zeroth")  # as its ranks do when they start again


def test_a_save_that_another_fit_overtakes_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process were stopped in the middle of a save, and went on once the other fit had trained an epoch."""
    store = Store.create(tmp_path)
    first, second = (Checkpoints(store, "run", fit) for fit in ("first", "second"))
    save = torch.save

    def stopped_for_long(state: dict[str, Any], file: Any) -> None:
        save(state, file)
        if state["epoch"] == 1:
            second.claim()
            write(store, store.checkpoint_path("run", LAST), {"epoch": 2})

    monkeypatch.setattr(torch, "save", stopped_for_long)
    first.claim()
    first.save({LAST: {"epoch": 1}})
    with pytest.raises(StoreError, match="another fit has begun to train this run"):
        first.finish()
    assert second.load()["epoch"] == 2


def test_ranks_that_start_again_do_not_take_a_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they warn of the options of a checkpoint that their own fit has written."""
    monkeypatch.setattr("spark_hvd.torch.rank", lambda: 0)
    store = Store.create(tmp_path)
    former, this, later = (Checkpoints(store, "run", fit) for fit in ("former", "this", "later"))
    spec: Any = SimpleNamespace(former_fit="former", epochs=2)
    nothing: Any = None
    started, restarted = (
        Job(spec, nothing, nothing, {"history": []}, History(), this, nothing, nothing, nothing) for _ in range(2)
    )
    former.claim()
    store.write_bytes(store.checkpoint_path("run", TRAINED), b"weights of the former")
    assert started.warns
    started.begin()
    assert (this.is_owner, this.exists(TRAINED)) == (True, False)
    assert not restarted.warns
    restarted.begin()
    later.claim()
    store.write_bytes(store.checkpoint_path("run", TRAINED), b"weights of the later")
    with pytest.raises(StoreError, match="another fit has begun"):
        restarted.begin()
    assert (later.is_owner, later.exists(TRAINED)) == (True, True)


def test_one_fit_of_a_run_at_a_time(tmp_path: Path) -> None:
    store, another = Store.create(tmp_path / "here"), Store.create(tmp_path / "there")
    for _ in range(2):
        with only_fit_of(store, "run"), only_fit_of(store, "walk"), only_fit_of(another, "run"):
            again = only_fit_of(store, "run")
            with pytest.raises(ValueError, match="run_id='run' is being trained by another fit"), again:
                pytest.fail("it began")
