"""Runs, fits and checkpoints on a server for every kind of store, configured by the environment, as on a cluster.

The row `stores` of tests/matrix.py installs the servers, and fails if one is missing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import fsspec.config
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spark_hvd
from spark_hvd.estimators import Store
from spark_hvd.runner import RankFailedError
from tests import stores
from tests.contract.test_checkpoint import resume_sharded, sharded, train_sharded
from tests.smoke import MINE, torch_estimator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests
s3, gs, abfs, hdfs = stores.s3, stores.gs, stores.abfs, stores.hdfs


@pytest.fixture(scope="module")
def servers(s3: dict[str, Any], gs: dict[str, Any], abfs: dict[str, Any], hdfs: str) -> Iterator[dict[str, str]]:
    """The root of a store for each protocol, with the settings that docs/data.md requires."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3["endpoint_url"])
        patch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])
        patch.setenv("STORAGE_EMULATOR_HOST", gs["endpoint_url"])
        patch.setenv("FSSPEC_GS_TOKEN", gs["token"])
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", abfs["connection_string"])
        fsspec.config.set_conf_env(fsspec.config.conf)  # this process read it earlier
        yield {"s3": "s3a://bucket", "gs": "gs://bucket", "abfs": "abfss://bucket@account.host", "hdfs": hdfs}


@pytest.fixture(scope="module")
def session(servers: dict[str, str], request: pytest.FixtureRequest) -> SparkSession:
    """A session whose processes have the environment for the servers."""
    found: SparkSession = request.getfixturevalue("spark")
    return found


@pytest.fixture(params=["hdfs", "s3", "gs", "abfs"])
def store(request: pytest.FixtureRequest, session: SparkSession, servers: dict[str, str]) -> Store:
    return Store.create(f"{servers[request.param]}/{request.node.name.partition('[')[0]}")


def rows_and_step(folder: str) -> tuple[int, int | None]:
    """Return the number of rows that a rank reads, and the step of the checkpoint before the one that it saves."""
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


def save_and_die(folder: str) -> None:
    """Save a checkpoint during which rank 1 is killed, after the first of its tensors."""
    from torch.distributed.checkpoint import filesystem

    import spark_hvd.torch as hvd

    write = filesystem._write_item

    def die(*args: Any, **options: Any) -> None:
        write(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer = sharded(0)
    if hvd.rank() == 1:
        filesystem._write_item = die
    hvd.checkpoint.save_sharded(folder, model, optimizer, step=9)


def test_sharded_checkpoints_outlive_a_killed_save_and_fit_any_number_of_ranks(store: Store) -> None:
    folder = store.join("sharded")

    def kept() -> tuple[list[str], int]:
        names = [path.rpartition("/")[2] for path in store.list(folder)]
        return [name for name in names if name.endswith("json")], sum(name.endswith(".shards") for name in names)

    def manifests(*steps: int) -> list[str]:
        return [f"step-{step:012}.sharded.json" for step in steps]

    weights, _ = spark_hvd.run_local(train_sharded, (folder, 3), **MINE)
    assert kept() == (manifests(2, 3), 2)
    with pytest.raises(RankFailedError):
        spark_hvd.run_local(save_and_die, (folder,), **MINE)
    assert kept() == (manifests(2, 3), 3)
    for ranks in (1, 3):
        for found in spark_hvd.run_local(resume_sharded, (folder, ranks > 1), num_proc=ranks, verbose=0):
            assert found[:2] == (3, {"epoch": 2})
            assert np.allclose(np.concatenate(found[2]), np.concatenate(weights), atol=1e-6)
    spark_hvd.run_local(train_sharded, (folder, 4, 1), num_proc=3, verbose=0)
    assert kept() == (manifests(4), 1)
