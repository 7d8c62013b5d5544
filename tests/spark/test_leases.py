"""Materialised data stay while a fit uses them, for any time, and are removed after seven days without use."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.estimators import LocalBackend
from spark_hvd.estimators.data import reuse
from spark_hvd.estimators.data.reuse import delete_unused, in_use
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError
from tests.conftest import wait_until
from tests.spark.estimator_support import estimator, frame
from tests.spark.test_reuse import write, written

DAY = 86400.0


class Clock:
    """A clock that stands still until told to go on."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reuse, "clock", clock)
    monkeypatch.setattr(reuse, "RENEW_SECONDS", 0.01)
    return clock


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="module")
def path(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(spark, tmp_path_factory.mktemp("rows"))


def lease_of(store: Store) -> float:
    (path,) = Path(store.url, "intermediate_data").glob("*/_used")
    return float(path.read_text())


class Slow(LocalBackend):
    """Would train for nine days, during which other processes clean up."""

    def __init__(self, store: Store, clock: Clock) -> None:
        super().__init__(2)
        self.store, self.clock, self.files = store, clock, set[str]()

    def run(self, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.files = {group.file for data in (args[0].train, args[0].validation) for group in data.row_groups}
        for _ in range(3):
            self.clock.now += 3 * DAY
            wait_until(lambda: lease_of(self.store) == self.clock.now)
            delete_unused(self.store)
        assert all(Path(file).exists() for file in self.files)
        raise InterruptedError("nine days are enough")


def test_a_fit_of_nine_days_keeps_its_data(spark: SparkSession, store: Store, clock: Clock) -> None:
    backend = Slow(store, clock)
    with pytest.raises(InterruptedError, match="nine days"):
        estimator(store=store, num_proc=None, backend=backend, validation=0.5).fit(frame(spark))
    assert len(backend.files) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "spark_hvd-lease"]
    clock.now += 7.1 * DAY
    delete_unused(store)
    assert store.list(store.join("intermediate_data")) == []


def test_data_in_use_stay_whoever_uses_them(spark: SparkSession, store: Store, path: str, clock: Clock) -> None:
    data = write(spark.read.parquet(path), store)
    clock.now += 6.9 * DAY
    delete_unused(store)
    with in_use(store, data):
        clock.now += 7.1 * DAY
        wait_until(lambda: lease_of(store) == clock.now)
        delete_unused(store)
        assert Path(data.row_groups[0].file).exists()


def test_a_store_that_fails_for_a_while_ends_no_training(
    spark: SparkSession, store: Store, path: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(spark.read.parquet(path), store)
    home, away, file = (Path(store.url, name) for name in ("intermediate_data", "away", "in the way"))
    file.touch()

    def put(target: Path) -> None:  # at once, so that no directory is created there meanwhile
        link = home.with_name("link")
        link.symlink_to(target)
        link.replace(home)

    home.rename(away)
    put(away)
    with in_use(store, data):
        put(file)
        wait_until(lambda: "The data of a running training are deleted if this lasts 7 days" in caplog.text)
        put(away)
        clock.now += 1
        wait_until(lambda: lease_of(store) == clock.now)


@dataclass(frozen=True)
class Interrupted(Store):
    """Calls a function before it reads, or changes, its n-th path."""

    calls: list[Callable[[], Any] | None] = field(default_factory=list, repr=False, compare=False)

    def _next(self) -> None:
        call = self.calls.pop(0) if self.calls else None
        if call is not None:
            call()

    def read_bytes(self, path: str) -> bytes:
        self._next()
        return super().read_bytes(path)

    def list(self, path: str, *, unfinished: bool = False) -> list[str]:
        self._next()
        return super().list(path, unfinished=unfinished)

    def delete(self, path: str) -> None:
        self._next()
        super().delete(path)


def take_up(found: list[DatasetMeta], path: str, store: Store) -> None:
    found.append(write(SparkSession.active().read.parquet(path), store))


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.night), True])
@pytest.mark.slow
def test_a_fit_that_starts_during_a_clean_up_has_its_data(
    spark: SparkSession, tmp_path: Path, path: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """At each point where the clean-up of another process touches the store."""
    for place in range(20):
        store = Store.create(tmp_path / f"{place}")
        old = write(spark.read.parquet(path), store)
        if killed:  # its writer was killed before the manifest
            next(Path(store.url).rglob(reuse.MANIFEST)).unlink()
        clock.now += 7.1 * DAY
        found: list[DatasetMeta] = []
        call = functools.partial(take_up, found, path, store)
        with monkeypatch.context() as patch:
            patch.setattr("spark_hvd.estimators.data.materialize.delete_unused", lambda store: None)
            delete_unused(Interrupted(store.url, calls=[None] * place + [call]))
        if not found:  # the clean-up touches fewer points
            assert not Path(old.url).exists()
            break
        assert all(Path(group.file).exists() for group in found[0].row_groups), place
    assert place > 5


def test_a_clean_up_that_is_cut_off_is_finished_by_the_next(
    spark: SparkSession, tmp_path: Path, path: str, clock: Clock
) -> None:
    def fail() -> None:
        raise StoreError("the network is down")

    write(spark.read.parquet(path), Store.create(tmp_path / "once", train_path=tmp_path / "train once"))
    clock.now += 7.1 * DAY
    for place in range(20):
        store = Store.create(tmp_path / f"{place}", train_path=tmp_path / f"train{place}")
        shutil.copytree(tmp_path / "once", store.url, dirs_exist_ok=True)
        shutil.copytree(tmp_path / "train once", tmp_path / f"train{place}", dirs_exist_ok=True)
        cut = Interrupted(store.url, train_path=store.train_path, calls=[None] * place + [fail])
        delete_unused(cut)
        delete_unused(store)
        assert [path for path in tmp_path.glob(f"*{place}/**/*") if path.is_file()] == []
        if cut.calls:
            break
    assert place > 5


def test_data_that_cannot_be_deleted_at_the_end_are_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Store, path: str) -> None:
        raise StoreError(f"cannot delete {path}: access denied")

    with reuse.using(store, "key"):
        pass
    monkeypatch.setattr(Store, "delete", refuse)
    reuse._delete_mine()
    assert f"data stay in {store.data_path('key')}: cannot delete" in caplog.text
