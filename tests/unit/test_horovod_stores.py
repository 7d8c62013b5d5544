"""Stores under Horovod's names: paths can be replaced on the object and in a subclass; ranks get a plain store."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (("/user/me/fits",), "hdfs:///user/me/fits"),
        (("hdfs:///user/me/fits",), "hdfs:///user/me/fits"),
        (("/user/me/fits", "nn1", 8020), "hdfs://nn1:8020/user/me/fits"),
        (("hdfs:///fits", "nn1"), "hdfs://nn1/fits"),
        (("hdfs://nn1:8020/fits", "nn1", 8020), "hdfs://nn1:8020/fits"),
    ],
)
def test_a_store_on_hdfs_is_there(arguments: tuple[Any, ...], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_hvd.horovod.stores import HDFSStore
    from spark_hvd.store import files

    monkeypatch.setattr(files, "check_protocol", lambda url: None)  # no package for HDFS is installed
    store = HDFSStore(*arguments)
    assert (store.url, store.get_runs_path()) == (url, f"{url}/runs")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prefix_path": "/x", "user": "me"}, "user='me'.*set HADOOP_USER_NAME"),
        ({"prefix_path": "/x", "kerb_ticket": "/tmp/t"}, "kerb_ticket='/tmp/t'.*set KRB5CCNAME"),
        ({"prefix_path": "/x", "port": 8020}, r"port=8020\) needs host="),
        ({"prefix_path": "hdfs://nn2/x", "host": "nn1"}, "another name node than host and port, 'nn1'"),
        ({"prefix_path": "fits/x"}, "expected hdfs://host:port/path, hdfs:///path or /path"),
    ],
)
def test_a_store_on_hdfs_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    from spark_hvd.horovod.stores import HDFSStore

    with pytest.raises(ValueError, match=said):
        HDFSStore(**arguments)


def test_each_setting_of_spark_has_a_default() -> None:
    from spark_hvd.horovod import spark_conf

    pairs = [value for value in vars(spark_conf).values() if isinstance(value, tuple)]
    assert {name for name, _ in pairs} == spark_conf.SPARK_CONF_DEFAULT_VALUES.keys()
