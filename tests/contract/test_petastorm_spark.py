"""Petastorm with Spark: data sets written by its codecs are read back by value; its objects reach Spark's workers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import ReaderSpec
from spark_hvd.estimators.petastorm import bridge
from spark_hvd.estimators.petastorm.reader import columns_of_unischema, load_unischema
from spark_hvd.estimators.training.rows import open_reader
from spark_hvd.store import Store
from tests.conftest import daemon_of
from tests.contract import reader_data
from tests.contract.reader_data import Share

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if importlib.util.find_spec("petastorm") is None:
    pytest.skip("needs petastorm", allow_module_level=True)

bridge.install()

from petastorm import make_batch_reader, make_reader  # noqa: E402
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec  # noqa: E402
from petastorm.etl.dataset_metadata import get_schema_from_dataset_url, materialize_dataset  # noqa: E402
from petastorm.predicates import in_set  # noqa: E402
from petastorm.pytorch import DataLoader  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

ROWS = 30


def schema() -> Any:
    from pyspark.sql.types import DecimalType, FloatType, IntegerType, StringType

    return Unischema(
        "Everything",
        [
            UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
            UnischemaField("small", np.uint8, (), ScalarCodec(IntegerType()), False),
            UnischemaField("score", np.float32, (), ScalarCodec(FloatType()), True),
            UnischemaField("text", np.str_, (), ScalarCodec(StringType()), False),
            UnischemaField("price", np.float64, (), ScalarCodec(DecimalType(10, 2)), False),
            UnischemaField("plain", np.int64, (), None, False),
            UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
            UnischemaField("packed", np.int16, (4,), CompressedNdarrayCodec(), False),
            UnischemaField("image", np.uint8, (8, 8, 3), CompressedImageCodec("png"), False),
            UnischemaField("any", np.float32, (None, 2), NdarrayCodec(), True),
        ],
    )


def row(i: int) -> dict[str, Any]:
    return {
        "id": np.int32(i),
        "small": np.uint8(200 + i),
        "score": None if i == 7 else i / 4,
        "text": f"row {i}",
        "price": i + 0.25,
        "plain": np.int64(-i),
        "matrix": np.full((2, 3), i, np.float32),
        "packed": np.arange(i, i + 4, dtype=np.int16),
        "image": np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8),
        "any": None if i == 3 else np.ones((1 + i % 2, 2), np.float32),
    }


@pytest.fixture(scope="module")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """30 rows of every codec, in three files, written by Spark's Python workers."""
    from decimal import Decimal

    target, kinds = f"file://{tmp_path_factory.mktemp('unischema')}/data", schema()

    def encoded(i: int) -> Any:
        values = row(i)
        return dict_to_spark_row(kinds, {**values, "price": Decimal(str(values["price"]))})

    with materialize_dataset(spark, target, kinds, row_group_size_mb=1):
        rows = spark.sparkContext.parallelize(range(ROWS), 3).map(bridge.bridged(encoded))
        spark.createDataFrame(rows, kinds.as_spark_schema()).write.parquet(target)
    return target


def read(url: str, **options: Any) -> dict[int, Any]:
    with make_reader(url, **{"workers_count": 2, **options}) as reader:
        return {int(each.id): each for each in reader}


def test_codecs_by_value(written: str) -> None:
    found = read(written, workers_count=1)  # two threads at once cannot parse headers of .npy in CPython before 3.11.8
    assert sorted(found) == list(range(ROWS))
    for i, each in found.items():
        for name, value in row(i).items():
            got = getattr(each, name)
            if name == "price":
                assert float(got) == value
            elif value is None and name == "score":
                assert np.isnan(got)  # Petastorm's own
            elif value is None:
                assert got is None
            else:
                np.testing.assert_array_equal(got, value)
                if isinstance(value, np.ndarray | np.generic):
                    assert got.dtype == value.dtype
    assert set(get_schema_from_dataset_url(written).fields) == set(row(0))


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_every_pool_reads_all_rows(written: str, pool: str) -> None:
    workers = 1 if pool == "process" else 2  # a process needs seconds for imports
    options = {"reader_pool_type": pool, "workers_count": workers}
    assert sorted(read(written, schema_fields=["id", "image"], **options)) == list(range(ROWS))


def test_predicates_and_shards(written: str) -> None:
    assert sorted(read(written, predicate=in_set({2, 5, 99}, "id"))) == [2, 5]
    shards = [sorted(read(written, cur_shard=shard, shard_count=3, seed=0)) for shard in range(3)]
    assert sorted(i for shard in shards for i in shard) == list(range(ROWS))
    assert [len(shard) for shard in shards] == [10, 10, 10]


def test_loader(written: str) -> None:
    with DataLoader(make_reader(written, schema_fields=["id", "matrix"]), batch_size=10) as loader:
        found = {int(i): each for batch in loader for i, each in zip(batch["id"], batch["matrix"], strict=True)}
    assert sorted(found) == list(range(ROWS))
    for i, matrix in found.items():
        assert torch.equal(matrix, torch.full((2, 3), float(i)))


# -- our reader on the same data

NAMES = ("id", "small", "plain", "price", "matrix", "packed", "image")


def opened(written: str, columns: tuple[str, ...] = NAMES, **options: Any) -> Share:
    folder = written.removeprefix("file://")
    store = Store.create(os.path.dirname(folder))
    return reader_data.opened(None, dataset_of(store, folder), store, 4, columns=columns, **options)


def test_reader_by_value(written: str) -> None:
    from spark_hvd.estimators.petastorm.reader import PetastormReader

    reader = opened(written)
    assert isinstance(reader.reader, PetastormReader)
    batches = list(reader.batches(0))
    reader.close()
    assert [len(batch["id"]) for batch in batches] == [4] * 7 + [2]
    dtypes = {
        "id": torch.int32,
        "small": torch.uint8,
        "plain": torch.int64,
        "price": torch.float32,
    }  # doubles are read as float32
    dtypes |= {"matrix": torch.float32, "packed": torch.int16, "image": torch.uint8}
    assert {name: batches[0][name].dtype for name in batches[0]} == dtypes
    columns = {name: torch.cat([batch[name] for batch in batches]) for name in NAMES}
    assert sorted(columns["id"].tolist()) == list(range(ROWS))
    for at, i in enumerate(columns["id"].tolist()):
        for name in NAMES:
            np.testing.assert_array_equal(columns[name][at].numpy(), row(i)[name], err_msg=name)


@pytest.mark.parametrize("pool", ["process", "dummy"])
@pytest.mark.slow
def test_every_pool_yields_the_same_batches(written: str, pool: str) -> None:
    options = {"shuffle": True, "seed": 3, "window_rows": 8, "columns": ("id", "image"), "size": 2, "rank": 1}
    reader, other = opened(written, **options), opened(written, pool=pool, workers=1, **options)
    for number in (0, 1):
        for mine, same in zip(reader.batches(number), other.batches(number), strict=True):
            assert all(torch.equal(mine[name], same[name]) for name in ("id", "image"))
    reader.close()
    other.close()


def test_reader_names_nulls_and_what_has_no_tensor(written: str) -> None:
    with pytest.raises(DataError, match=r"column 'score' in .*\.parquet, row group 0 has 1 null"):
        list(opened(written, columns=("score",)).batches(0))
    with pytest.raises(DataError, match=r"column 'any' in .* has 1 null"):
        list(opened(written, columns=("any",)).batches(0))
    with pytest.raises(DataError, match=r"column 'text' in .* holds string"):
        list(opened(written, columns=("text",)).batches(0))
    with pytest.raises(DataError, match="column 'nope' is not in"):
        opened(written, columns=("nope",))


def test_transformation_gets_decoded_rows(written: str) -> None:
    def mean(frame: Any) -> Any:
        frame["mean"] = [image.mean(dtype=np.float32) for image in frame["image"]]
        return frame.drop(columns=["image"])

    fields = (("mean", np.float32, (), False),)
    columns = ("id", "image")
    spec = {"columns": columns, "edit_fields": fields, "removed_fields": ("image",), "transformation_fn": mean}
    batches = list(opened(written, **spec).batches(0))
    found = {i: m for batch in batches for i, m in zip(batch["id"].tolist(), batch["mean"].tolist(), strict=True)}
    assert found == {i: row(i)["image"].mean(dtype=np.float32).item() for i in range(ROWS)}


def test_columns_of_the_unischema(written: str) -> None:
    folder = written.removeprefix("file://")
    columns = {c.name: c for c in columns_of_unischema(load_unischema(Store.create(folder), folder))}
    assert (columns["image"].dtype, columns["image"].shape) == ("uint8", (8, 8, 3))
    assert (columns["small"].dtype, columns["any"].shape, columns["text"].dtype) == ("uint8", None, "object")


def test_a_unischema_that_cannot_be_read(written: str, tmp_path: Path) -> None:
    meta = DatasetMeta(str(tmp_path), (), (), unischema=True)
    store = Store.create(tmp_path)
    with pytest.raises(DataError, match=r"cannot read the Unischema of .*: PetastormMetadataError"):
        open_reader(ReaderSpec(dataset=meta, columns=(), store=store))
    (tmp_path / "_common_metadata").write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot read the Unischema of"):
        open_reader(ReaderSpec(dataset=replace(meta), columns=(), store=store))


# -- Spark's workers


@pytest.fixture
def converter(spark: SparkSession, tmp_path: Path) -> Iterator[Any]:
    from petastorm.spark import SparkDatasetConverter, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}")
    frame = spark.range(50, numPartitions=2).selectExpr(
        "id", "cast(id as double) / 2 as half", "array(id, -id) as pair"
    )
    made = make_spark_converter(frame)
    yield made
    made.delete()
    assert not os.path.exists(made.cache_dir_url.removeprefix("file://"))


def test_converter(converter: Any) -> None:
    assert len(converter) == 50
    with converter.make_torch_dataloader(batch_size=20, num_epochs=1) as loader:
        found = list(loader)
    assert sorted(i for batch in found for i in batch["id"].tolist()) == list(range(50))
    for batch in found:
        assert torch.equal(batch["half"], batch["id"].float() / 2)  # doubles are written as float32
        assert batch["pair"].tolist() == [[i, -i] for i in batch["id"].tolist()]


def test_converter_in_a_spark_task(spark: SparkSession, converter: Any) -> None:
    def total(shards: Iterator[int]) -> Iterator[int]:
        for shard in shards:
            options = {"num_epochs": 1, "workers_count": 1, "cur_shard": shard, "shard_count": 2}
            with converter.make_torch_dataloader(batch_size=7, **options) as loader:
                yield sum(int(batch["id"].sum()) for batch in loader)

    sums = spark.sparkContext.parallelize([0, 1], 2).mapPartitions(bridge.bridged(total)).collect()
    assert sum(sums) == sum(range(50))
    assert min(sums) > 0


def test_bridged_keeps_name_and_behaviour() -> None:
    def double(x: int) -> int:
        """Return twice x."""
        return 2 * x

    wrapped = bridge.bridged(double)
    assert (wrapped(4), wrapped.__name__, wrapped.__doc__) == (8, "double", "Return twice x.")


@pytest.fixture
def daemon(spark: SparkSession) -> Iterator[SparkSession]:
    with daemon_of(spark, "spark_hvd.estimators.petastorm.daemon"):
        yield spark


def test_the_daemon(daemon: SparkSession, written: str) -> None:
    """Code in Petastorm that cannot be wrapped: row-group indexes and RDDs of data sets."""
    from petastorm.etl.rowgroup_indexers import SingleFieldIndexer
    from petastorm.etl.rowgroup_indexing import build_rowgroup_index
    from petastorm.selectors import SingleIndexSelector
    from petastorm.spark_utils import dataset_as_rdd

    assert sorted(int(each.id) for each in dataset_as_rdd(written, daemon).collect()) == list(range(ROWS))
    build_rowgroup_index(written, daemon.sparkContext, [SingleFieldIndexer("ids", "id")])
    assert sorted(read(written, rowgroup_selector=SingleIndexSelector("ids", [15]))) == list(range(10, 20))


def test_batch_reader_warns_of_a_unischema(written: str) -> None:
    with pytest.warns(UserWarning, match="Please use make_reader"), make_batch_reader(written) as reader:
        assert sum(len(batch.id) for batch in reader) == ROWS
