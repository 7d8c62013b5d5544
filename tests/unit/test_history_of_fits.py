"""The history of a fit: unique names, and a valid best epoch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.estimators.torch import trial
from spark_hvd.estimators.torch.objective import Metrics
from spark_hvd.estimators.training import train
from spark_hvd.estimators.training.background_validation import Results, ValidationRequest
from spark_hvd.estimators.training.callbacks import Callback, EarlyStopping
from spark_hvd.estimators.training.history import History


def metric(name: str) -> Any:
    def function(output: Any, label: Any) -> Any:
        return output

    function.__name__ = name
    return function


def history(*values: float) -> History:
    return History({"epoch": number + 1, "auc": value} for number, value in enumerate(values))


def test_nan_is_never_the_best() -> None:
    assert history(math.nan, 0.7, 0.9).best("auc", "max")["epoch"] == 3
    assert history(math.nan, 0.7, 0.9).best("auc")["epoch"] == 2
    assert history(math.nan, math.nan).best("auc")["epoch"] == 1
    results = Results()
    for number, row in enumerate(history(math.nan, 0.7)):
        results.add(ValidationRequest(0, number + 1), {"auc": row["auc"]})
    assert results.best("auc", 1.0, history(0.0, 0.0)) == 0.7


@pytest.mark.parametrize("values", [(math.nan, 0.5, 0.7), (math.nan,)])
def test_weights_of_an_epoch_with_nan_are_not_kept(monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...]) -> None:
    monkeypatch.setattr(train.hvd, "rank", lambda: 0)
    monkeypatch.setattr(train.hvd, "size", lambda: 1)
    monkeypatch.setattr(train, "order_of", lambda *_: {})
    kept: list[int] = []
    job: Any = object.__new__(train.Job)
    job.__dict__.update(
        spec=SimpleNamespace(
            derived={},
            checkpoint_every=None,
            seed=1,
            epochs=9,
            monitor="auc",
            monitor_mode="min",
            restore_best_weights=True,
            keeps_epochs=False,
        ),
        state=None,
        background_validation=None,
        awaits_validation=False,
        feed=SimpleNamespace(position=SimpleNamespace(to_json=dict)),
        rows=SimpleNamespace(sharding=SimpleNamespace(rows=1), layout=1),
        history=History(),
        checkpoints=SimpleNamespace(
            save=lambda states, _: kept.append(len(job.history)) if train.BEST in states else None
        ),
    )
    for row in history(*values):
        job.history.append(row)
        train.Job.save(job, {}, dict)
    assert kept == ([2] if len(values) > 1 else [])


def test_an_epoch_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a LightningModule logs something under that name."""
    monkeypatch.setattr(train.hvd, "rank", lambda: 1)
    monkeypatch.setattr(train.hvd, "generation", lambda: 0)
    job: Any = SimpleNamespace(history=History(), background_validation=None, progress=None)
    for _ in range(2):
        train.Job.add(job, {"loss": 0.5, "epoch": 0.0}, lr=0.1)
    assert [row["epoch"] for row in job.history] == [1, 2]


def test_names_of_metrics() -> None:
    names = ["f1_macro", "f1", "acc_2", "acc", "acc", "acc_2"]
    found = Metrics([list(map(metric, names))], ["y"]).names
    assert found == ["f1_macro", "f1", "acc_2", "acc", "acc_3", "acc_2_2"]


@pytest.mark.parametrize("name", ["loss", "lr", "epoch", "val_loss", "val_acc"])
def test_a_metric_that_would_hide_something_else_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"a function called '{name}'"):
        Metrics([[metric("acc"), metric(name)]], ["y"])


def test_what_is_monitored_is_known_before_ranks_start() -> None:
    def check(monitor: str | None, *callbacks: Callback) -> None:
        spec: Any = SimpleNamespace(monitor=monitor)
        trial._check_monitors(spec, SimpleNamespace(callbacks=callbacks), ["acc"])  # type: ignore[arg-type] # a stub

    class AddsToRows(Callback):
        pass

    for monitor in (None, "loss", "val_acc", "lr"):
        check(monitor, EarlyStopping(monitor))
    check("auc", AddsToRows())
    for wrong in (("auc",), (None, EarlyStopping("auc"))):
        with pytest.raises(ValueError, match=r"monitor='auc': expected one of \['loss', 'acc', 'val_loss'"):
            check(*wrong)  # type: ignore[arg-type] # of two kinds
