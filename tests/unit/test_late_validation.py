"""Validation in parallel with training: which checkpoint is next, what ranks get of it, and delayed results."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.estimators import EarlyStopping, History
from spark_hvd.estimators.fit.beside import Beside, Order
from spark_hvd.estimators.training.callbacks import _NewEntries
from spark_hvd.estimators.training.history import monitored
from spark_hvd.estimators.training.late import LateValidation, MeetingPlace, Results, Ticket
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from tests.conftest import wait_until


def ticket(epoch: int, generation: int = 0) -> Ticket:
    return Ticket(generation, epoch)


def ended(order: Order, outcome: Any) -> str | None:
    assert order.turn is not None
    order.turn.outcome = outcome
    return order.end()


def test_one_at_a_time_and_the_newest() -> None:
    order = Order()
    assert order.next([], False) is None
    first = order.next([ticket(1)], False)
    assert first is not None
    order.starts(ticket(2))  # another checkpoint came before it had its slots
    assert (first.ticket, order.next([ticket(5)], False)) == (ticket(2), None)
    assert ended(order, (ticket(2), {"val_loss": 3.0})) is None
    assert order.next([ticket(2)], False) is None, "not again"
    second = order.next([ticket(5), ticket(1, generation=1)], False)
    assert second is not None
    assert second.ticket == ticket(1, generation=1), "ranks were started again since"
    assert ended(order, None) is None, "it found nothing"
    assert order.results == Results({2: (0, {"val_loss": 3.0})})


def test_the_end_waits_for_what_has_its_slots_and_for_nothing_else() -> None:
    order = Order()
    waiting = order.next([ticket(1)], False)
    assert waiting is not None
    order.starts(ticket(1))  # other ranks may still hold the slots
    order.next([ticket(1)], True)
    assert waiting.stop.is_set()
    ended(order, KeyboardInterrupt())
    assert (order.next([ticket(1)], True), order.results.ended) == (None, True)

    order = Order()
    begun = order.next([ticket(1)], False)
    assert begun is not None
    order.starts(ticket(1))
    order.runs()
    order.next([ticket(2)], True)
    assert (begun.stop.is_set(), order.results.ended) == (False, False)
    ended(order, (ticket(1), {"val_loss": 1.0}))
    order.next([ticket(2)], True)
    assert order.results == Results({1: (0, {"val_loss": 1.0})}, ended=True)


def test_one_that_fails_is_told_and_not_tried_again() -> None:
    order = Order()
    order.next([ticket(1)], False)
    assert ended(order, ValueError("no such metric")) == "ValueError: no such metric"
    assert order.next([ticket(1)], False) is None
    assert order.next([ticket(2)], False) is not None
    assert order.results.best("val_loss", 1.0, History([{"epoch": 1}])) is None


def test_ranks_take_what_belongs_to_their_weights() -> None:
    history = History([{"epoch": 1}, {"epoch": 2, "restarts": 1}, {"epoch": 3, "restarts": 1}])
    results = Results()
    for epoch, generation in ((3, 0), (1, 0), (2, 1), (4, 0)):
        results.add(ticket(epoch, generation), {"val_loss": float(epoch)})
    # Restarted after epoch 1: the third was trained again, and the old result belongs to other weights.
    assert list(results.of(history)) == [1, 2]
    assert results.best("val_loss", -1.0, history) == -2.0
    results.add(ticket(3, 1), {"val_loss": 0.5})
    assert results.of(history) == {1: {"val_loss": 1.0}, 2: {"val_loss": 2.0}, 3: {"val_loss": 0.5}}
    assert results.best("val_loss", 1.0, history) == 0.5


def test_ranks_bear_a_store_that_fails_for_a_moment_and_a_driver_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(
        "spark_hvd.estimators.training.late.time", SimpleNamespace(monotonic=lambda: now, time=time.time)
    )
    place = MeetingPlace(Store.create(tmp_path), "run")
    ranks = LateValidation(place, says=True)
    place.publish(Results({1: (0, {"val_loss": 1.0})}))
    assert ranks._results().epochs == {1: (0, {"val_loss": 1.0})}

    def fails(place: MeetingPlace) -> Results:
        raise StoreError("no content")

    with monkeypatch.context() as patch:
        patch.setattr(MeetingPlace, "results", fails)
        assert ranks._results() == Results()
        now = 61.0
        with pytest.raises(StoreError, match="no content"):
            ranks._results()
    now = 500.0
    place.publish(Results())  # the same as before, but sent again
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
    place, go = MeetingPlace(store, "run", "this"), threading.Event()

    def leave(epoch: int) -> None:
        store.write_bytes(store.checkpoint_path("run", ticket(epoch).name), b"weights")

    def validate(results: Results, begun: Any) -> tuple[Ticket, dict[str, float]]:
        begun.start({})
        go.wait(60)
        newest = place.waiting()[-1]
        return newest, {"val_loss": float(newest.epoch)}

    leave(9)  # left by a driver that was killed
    place.publish(Results({1: (0, {"val_loss": 7.0}), 4: (0, {"val_loss": 4.0})}, ended=True))
    rows = History([{"epoch": 1, "loss": 1.0}])
    with Beside(place, validate, rows, lambda fn: fn):
        LateValidation(place, says=False).begin()
        assert place.results() == Results()
        place.owner.claim()
        wait_until(lambda: bool(place.results().epochs))
        assert place.results() == Results({1: (0, {"val_loss": 7.0})}), "of epochs that the history has"
        leave(2)
        wait_until(lambda: threading.active_count() and any("validate" in t.name for t in threading.enumerate()))
        monkeypatch.setattr(Store, "write_bytes", lambda *_: (_ for _ in ()).throw(store_error()))
        go.set()
        wait_until(lambda: "it is tried again" in caplog.text)
        monkeypatch.undo()
        wait_until(lambda: 2 in place.results().epochs)
        place.ask_for_no_more()
        wait_until(lambda: place.results().ended)
    assert [path.name for path in Path(store.run_path("run")).iterdir()] == ["owner"]
    assert not [t for t in threading.enumerate() if "spark_hvd-valid" in t.name]


@pytest.mark.parametrize("other", ["former", "next"])
def test_the_driver_leaves_another_fits_files_alone(tmp_path: Path, other: str) -> None:
    """The other one trains while this fit waits for slots, or has begun after it."""
    store = Store.create(tmp_path)
    this, theirs = (MeetingPlace(store, "run", fit) for fit in ("this", other))

    def validate(results: Results, begun: Any) -> None:
        raise AssertionError("it validated another fit's checkpoint")

    if other == "next":
        this.owner.claim()
    theirs.owner.claim()
    store.write_bytes(store.checkpoint_path("run", ticket(2).name), b"weights")
    theirs.publish(Results({1: (0, {"val_loss": 7.0})}))
    theirs.ask_for_no_more()
    before = theirs.results()
    with Beside(this, validate, History(), lambda fn: fn):
        pass
    Beside(this, validate, History(), lambda fn: fn)._look()
    assert (theirs.results(), theirs.waiting(), theirs.wants_no_more) == (before, [ticket(2)], True)
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
    assert [monitored(row, name, late=True) for name in (None, "val_accuracy", "loss")] == [
        "val_loss",
        "val_accuracy",
        "loss",
    ]
    assert monitored(row, None) == "loss"
    with pytest.raises(
        ValueError, match=r"monitor='val_lr': expected one of \['accuracy', 'epoch', 'loss', 'lr', 'val_ac"
    ):
        monitored(row, "val_lr", late=True)


def test_what_is_logged_of_a_history_comes_once_and_in_order() -> None:
    news, history = _NewEntries(), History([{"epoch": 1, "loss": 3.0}])
    news.skip(history)
    history += [{"epoch": 2, "loss": 2.0}, {"epoch": 3, "loss": 1.0}]
    assert list(news.of(history)) == [(2, "loss", 2.0), (3, "loss", 1.0)]
    history[0]["val_loss"] = 9.0
    history[2]["val_loss"] = 8.0
    assert list(news.of(history)) == [(1, "val_loss", 9.0), (3, "val_loss", 8.0)]
    assert not list(news.of(history))
