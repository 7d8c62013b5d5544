"""Runs, fits and checkpoints on a server of every kind of store, reached as a cluster reaches it: by its environment.

The row `stores` of tests/matrix.py installs the servers, and fails where one is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import fsspec.config
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spark_hvd
from spark_hvd.estimators import Store
from tests import stores
from tests.smoke import MINE, keep, torch_estimator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests
s3, gs, abfs, hdfs = stores.s3, stores.gs, stores.abfs, stores.hdfs


@pytest.fixture(scope="module")
def servers(s3: dict[str, Any], gs: dict[str, Any], abfs: dict[str, Any], hdfs: str) -> Iterator[dict[str, str]]:
    """The root of a store by its protocol; what docs/data.md says that is to be set is set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3["endpoint_url"])
        patch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])
        patch.setenv("STORAGE_EMULATOR_HOST", gs["endpoint_url"])
        patch.setenv("FSSPEC_GS_TOKEN", gs["token"])
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", abfs["connection_string"])
        fsspec.config.set_conf_env(fsspec.config.conf)  # this process has read it before
        yield {"s3": "s3a://bucket", "gs": "gs://bucket", "abfs": "abfss://bucket@account.host", "hdfs": hdfs}


@pytest.fixture(scope="module")
def session(servers: dict[str, str], request: pytest.FixtureRequest) -> SparkSession:
    """One whose processes have the environment of the servers."""
    found: SparkSession = request.getfixturevalue("spark")
    return found


@pytest.fixture(params=["hdfs", "s3", "gs", "abfs"])
def store(request: pytest.FixtureRequest, session: SparkSession, servers: dict[str, str]) -> Store:
    return Store.create(f"{servers[request.param]}/{request.node.name.partition('[')[0]}")


def rows_and_step(folder: str) -> tuple[int, int | None]:
    """How many rows a rank reads, and the step of the checkpoint before the one that it leaves."""
    import spark_hvd.torch as hvd

    rows = sum(len(batch["id"]) for batch in hvd.get_dataset_shard("train").torch_batches(10))
    saved = hvd.checkpoint.load(folder)
    before = None if saved is None else saved.step
    hvd.checkpoint.save(folder, {"rows": rows}, (before or 0) + 1)
    return rows, before


def test_a_run_reads_rows_and_goes_on_from_its_checkpoint(session: SparkSession, store: Store) -> None:
    with store.writing(store.join("rows", "part.parquet")) as file:
        pq.write_table(pa.table({"id": range(100)}), file)
    data, folder = {"train": store.join("rows")}, store.join("checkpoints")
    for before in (None, 1, 2):
        ran = spark_hvd.run(rows_and_step, (folder,), data=data, spark=session, **MINE)
        assert ran == [(50, before), (50, before)]
    if not store.url.startswith("hdfs"):  # files of hdfs-native do not tell their position, for which torch asks
        assert spark_hvd.run_local(keep, (store.join("kept"),), **MINE)[0] == (7, [0.0, 1.0, 2.0])


def test_a_fit_goes_on_from_its_checkpoint(session: SparkSession, store: Store) -> None:
    rows = [([i % 7 / 7, i % 5 / 5], i % 7 / 7 + i % 5 / 5) for i in range(120)]
    df = session.createDataFrame(rows, "features array<float>, value float").coalesce(1)
    first = torch_estimator(store=store, run_id="mine", epochs=1).fit(df).getHistory()
    second = torch_estimator(store=store, run_id="mine", epochs=2).fit(df)
    assert second.getHistory()[:1] == first
    assert [row["epoch"] for row in second.getHistory()] == [1, 2]
    assert second.transform(df).count() == 120
    names = {path.rpartition("/")[2] for path in store.list(store.run_path("mine"), unfinished=True)}
    assert names >= {"best.ckpt", "last.ckpt"}
    assert not [name for name in names if name.startswith(".")]
