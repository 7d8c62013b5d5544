"""Validation in parallel with training: which checkpoint is next, what ranks get of it, and delayed results."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.estimators import EarlyStopping, History
from spark_hvd.estimators.fit.background_validator import BackgroundValidator, ValidationScheduler
from spark_hvd.estimators.training.background_validation import (
    Results,
    ValidationClient,
    ValidationFolder,
    ValidationRequest,
)
from spark_hvd.estimators.training.callbacks import _NewEntries
from spark_hvd.estimators.training.history import monitored
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from tests.conftest import wait_until


def request(epoch: int, generation: int = 0) -> ValidationRequest:
    return ValidationRequest(generation, epoch)


def ended(scheduler: ValidationScheduler, outcome: Any) -> str | None:
    assert scheduler.run is not None
    scheduler.run.outcome = outcome
    return scheduler.end()


def test_one_at_a_time_and_the_newest() -> None:
    scheduler = ValidationScheduler()
    assert scheduler.next([], False) is None
    first = scheduler.next([request(1)], False)
    assert first is not None
    scheduler.starting(request(2))  # another checkpoint came before it had its slots
    assert (first.request, scheduler.next([request(5)], False)) == (request(2), None)
    assert ended(scheduler, (request(2), {"val_loss": 3.0})) is None
    assert scheduler.next([request(2)], False) is None, "not again"
    second = scheduler.next([request(5), request(1, generation=1)], False)
    assert second is not None
    assert second.request == request(1, generation=1), "ranks were started again since"
    assert ended(scheduler, None) is None, "it found nothing"
    assert scheduler.results == Results({2: (0, {"val_loss": 3.0})})


def test_the_end_waits_for_what_has_its_slots_and_for_nothing_else() -> None:
    scheduler = ValidationScheduler()
    waiting = scheduler.next([request(1)], False)
    assert waiting is not None
    scheduler.starting(request(1))  # other ranks may still hold the slots
    scheduler.next([request(1)], True)
    assert waiting.stop.is_set()
    ended(scheduler, KeyboardInterrupt())
    assert (scheduler.next([request(1)], True), scheduler.results.ended) == (None, True)

    scheduler = ValidationScheduler()
    begun = scheduler.next([request(1)], False)
    assert begun is not None
    scheduler.starting(request(1))
    scheduler.running()
    scheduler.next([request(2)], True)
    assert (begun.stop.is_set(), scheduler.results.ended) == (False, False)
    ended(scheduler, (request(1), {"val_loss": 1.0}))
    scheduler.next([request(2)], True)
    assert scheduler.results == Results({1: (0, {"val_loss": 1.0})}, ended=True)


def test_one_that_fails_is_told_and_not_tried_again() -> None:
    scheduler = ValidationScheduler()
    scheduler.next([request(1)], False)
    assert ended(scheduler, ValueError("no such metric")) == "ValueError: no such metric"
    assert scheduler.next([request(1)], False) is None
    assert scheduler.next([request(2)], False) is not None
    assert scheduler.results.best("val_loss", 1.0, History([{"epoch": 1}])) is None


def test_ranks_take_what_belongs_to_their_weights() -> None:
    history = History([{"epoch": 1}, {"epoch": 2, "restarts": 1}, {"epoch": 3, "restarts": 1}])
    results = Results()
    for epoch, generation in ((3, 0), (1, 0), (2, 1), (4, 0)):
        results.add(request(epoch, generation), {"val_loss": float(epoch)})
    # Restarted after epoch 1: the third was trained again, and the old result belongs to other weights.
    assert list(results.of(history)) == [1, 2]
    assert results.best("val_loss", -1.0, history) == -2.0
    results.add(request(3, 1), {"val_loss": 0.5})
    assert results.of(history) == {1: {"val_loss": 1.0}, 2: {"val_loss": 2.0}, 3: {"val_loss": 0.5}}
    assert results.best("val_loss", 1.0, history) == 0.5


def test_ranks_bear_a_store_that_fails_for_a_moment_and_a_driver_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(
        "spark_hvd.estimators.training.background_validation.time",
        SimpleNamespace(monotonic=lambda: now, time=time.time),
    )
    folder = ValidationFolder(Store.create(tmp_path), "run")
    ranks = ValidationClient(folder, verbose=True)
    folder.publish(Results({1: (0, {"val_loss": 1.0})}))
    assert ranks._results().epochs == {1: (0, {"val_loss": 1.0})}

    def fails(folder: ValidationFolder) -> Results:
        raise StoreError("no content")

    with monkeypatch.context() as patch:
        patch.setattr(ValidationFolder, "results", fails)
        assert ranks._results() == Results()
        now = 61.0
        with pytest.raises(StoreError, match="no content"):
            ranks._results()
    now = 500.0
    folder.publish(Results())  # the same as before, but sent again
    assert not ranks._results().ended
    now = 1000.0
    assert not ranks._results().ended
    now = 1101.0
    assert ranks._results().ended
    assert "Ranks no longer wait for it" in capsys.readouterr().out


def test_the_driver_tries_again_what_a_store_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.create(tmp_path)
    folder, go = ValidationFolder(store, "run", "this"), threading.Event()

    def leave(epoch: int) -> None:
        store.write_bytes(store.checkpoint_path("run", request(epoch).name), b"weights")

    def validate(results: Results, begun: Any) -> tuple[ValidationRequest, dict[str, float]]:
        begun.start({})
        go.wait(60)
        newest = folder.waiting()[-1]
        return newest, {"val_loss": float(newest.epoch)}

    leave(9)  # left by a driver that was killed
    folder.publish(Results({1: (0, {"val_loss": 7.0}), 4: (0, {"val_loss": 4.0})}, ended=True))
    rows = History([{"epoch": 1, "loss": 1.0}])
    with BackgroundValidator(folder, validate, rows, lambda fn: fn):
        ValidationClient(folder, verbose=False).begin()
        assert folder.results() == Results()
        folder.owner.claim()
        wait_until(lambda: bool(folder.results().epochs))
        assert folder.results() == Results({1: (0, {"val_loss": 7.0})}), "of epochs that the history has"
        leave(2)
        wait_until(lambda: threading.active_count() and any("validate" in t.name for t in threading.enumerate()))
        monkeypatch.setattr(Store, "write_bytes", lambda *_: (_ for _ in ()).throw(store_error()))
        go.set()
        wait_until(lambda: "it is tried again" in caplog.text)
        monkeypatch.undo()
        wait_until(lambda: 2 in folder.results().epochs)
        folder.request_end()
        wait_until(lambda: folder.results().ended)
    assert [path.name for path in Path(store.run_path("run")).iterdir()] == ["owner"]
    assert not [t for t in threading.enumerate() if "spark_hvd-valid" in t.name]


@pytest.mark.parametrize("other", ["former", "next"])
def test_the_driver_leaves_another_fits_files_alone(tmp_path: Path, other: str) -> None:
    """The other one trains while this fit waits for slots, or has begun after it."""
    store = Store.create(tmp_path)
    this, theirs = (ValidationFolder(store, "run", fit) for fit in ("this", other))

    def validate(results: Results, begun: Any) -> None:
        raise AssertionError("it validated another fit's checkpoint")

    if other == "next":
        this.owner.claim()
    theirs.owner.claim()
    store.write_bytes(store.checkpoint_path("run", request(2).name), b"weights")
    theirs.publish(Results({1: (0, {"val_loss": 7.0})}))
    theirs.request_end()
    before = theirs.results()
    with BackgroundValidator(this, validate, History(), lambda fn: fn):
        pass
    BackgroundValidator(this, validate, History(), lambda fn: fn)._look()
    assert (theirs.results(), theirs.waiting(), theirs.end_requested) == (before, [request(2)], True)
    assert theirs.results().at == before.at


def store_error() -> Exception:
    from spark_hvd.store.errors import StoreError

    return StoreError("out of reach")


def test_early_stopping_counts_what_it_knows_and_says_how_late() -> None:
    def state(*losses: float | None) -> Any:
        rows = [{"epoch": n, "loss": 1.0} for n in range(1, len(losses) + 1)]
        known = [row | ({} if loss is None else {"val_loss": loss}) for row, loss in zip(rows, losses, strict=True)]
        return SimpleNamespace(
            history=known, epoch=len(known) - 1, stop=False, stop_reason="", validation_in_background=True
        )

    stopping = EarlyStopping(patience=2)
    for losses in ([None], [1.0, None], [1.0, 2.0, None, None], [1.0, None, 2.0, None, None]):
        stopping.on_epoch_end(now := state(*losses))
        assert not now.stop, losses
    stopping.on_epoch_end(now := state(1.0, 2.0, None, 3.0, None, None))
    assert (now.stop, now.stop_reason) == (True, "stopped after epoch 6, by the val_loss of epoch 4")
    stopping.on_epoch_end(now := state(1.0, 2.0, 3.0))
    assert (now.stop, now.stop_reason) == (True, "")


def test_what_comes_late_is_known_beforehand() -> None:
    row = {"epoch": 1, "loss": 1.0, "accuracy": 0.5, "lr": 0.1}
    assert [monitored(row, name, in_background=True) for name in (None, "val_accuracy", "loss")] == [
        "val_loss",
        "val_accuracy",
        "loss",
    ]
    assert monitored(row, None) == "loss"
    with pytest.raises(
        ValueError, match=r"monitor='val_lr': expected one of \['accuracy', 'epoch', 'loss', 'lr', 'val_ac"
    ):
        monitored(row, "val_lr", in_background=True)


def test_what_is_logged_of_a_history_comes_once_and_in_order() -> None:
    news, history = _NewEntries(), History([{"epoch": 1, "loss": 3.0}])
    news.skip(history)
    history += [{"epoch": 2, "loss": 2.0}, {"epoch": 3, "loss": 1.0}]
    assert list(news.of(history)) == [(2, "loss", 2.0), (3, "loss", 1.0)]
    history[0]["val_loss"] = 9.0
    history[2]["val_loss"] = 8.0
    assert list(news.of(history)) == [(1, "val_loss", 9.0), (3, "val_loss", 8.0)]
    assert not list(news.of(history))
