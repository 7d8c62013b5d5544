"""Stores under Horovod's names: paths can be replaced on the object and in a subclass; ranks get a plain store."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from spark_hvd.store import Store


def test_paths_are_those_of_horovod(tmp_path: Path) -> None:
    from spark_hvd.horovod.stores import FilesystemStore

    store = FilesystemStore(str(tmp_path), save_runs=True)
    assert store.get_train_data_path() == f"{tmp_path}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{tmp_path}/intermediate_val_data.3"
    assert store.get_run_path("a") == f"{tmp_path}/runs/a"
    assert store.get_checkpoint_path("a") == store.plain.checkpoint_path("a")
    store.write_text(store.join("text"), "here")
    assert store.read(store.join("text")) == b"here"
    assert pickle.loads(pickle.dumps(store)).get_run_path("a") == store.get_run_path("a")


def test_data_count_where_they_are(tmp_path: Path) -> None:
    from spark_hvd.horovod.stores import FilesystemStore

    store = FilesystemStore(str(tmp_path))
    assert store.prepared == (None, None)
    (tmp_path / "mine").mkdir()
    store.get_train_data_path = lambda idx=None: str(tmp_path / "mine")  # type: ignore[method-assign]
    assert store.prepared == (str(tmp_path / "mine"), None)
    store._val_path = str(tmp_path / "mine")
    assert store.prepared[1] == str(tmp_path / "mine")
    with pytest.raises(AttributeError):
        Store.create(tmp_path).url = "frozen"  # type: ignore[misc]


def test_a_subclass_says_where_runs_are(tmp_path: Path) -> None:
    from spark_hvd.horovod.stores import FilesystemStore

    class Elsewhere(FilesystemStore):
        def get_runs_path(self) -> str:
            return self.join("elsewhere")

    plain = Elsewhere(str(tmp_path)).plain
    assert type(plain) is Store
    assert plain.run_path("a") == f"{tmp_path}/elsewhere/a"
    assert Store.create(tmp_path).plain.prepared == (None, None)


def test_each_setting_of_spark_has_a_default() -> None:
    from spark_hvd.horovod import spark_conf

    pairs = [value for value in vars(spark_conf).values() if isinstance(value, tuple)]
    assert {name for name, _ in pairs} == spark_conf.SPARK_CONF_DEFAULT_VALUES.keys()
