"""An unmodified Petastorm reads correct values, and nothing else in the process is changed for it."""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import itertools
import subprocess
import sys
import textwrap
import types
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch

from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.estimators.petastorm import bridge

if importlib.util.find_spec("petastorm") is None:
    pytest.skip("needs petastorm", allow_module_level=True)

bridge.install()

from petastorm import TransformSpec, make_batch_reader  # noqa: E402
from petastorm.codecs import CompressedImageCodec  # noqa: E402
from petastorm.predicates import in_intersection, in_lambda, in_negate  # noqa: E402
from petastorm.pytorch import BatchedDataLoader, DataLoader, InMemBatchedDataLoader  # noqa: E402
from petastorm.unischema import UnischemaField  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

ROWS, GROUP = 400, 10


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def url(path: Path) -> str:
    return f"file://{path}"


def batches(where: Any, **options: Any) -> list[Any]:
    with make_batch_reader(where, **{"workers_count": 2, "shuffle_row_groups": False, **options}) as reader:
        return list(reader)


def ids(where: Any, **options: Any) -> list[int]:
    return [int(value) for batch in batches(where, **options) for value in batch.id]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 rows in 4 files of 10 row groups of 10 rows."""
    folder = tmp_path_factory.mktemp("numbers")
    for part in range(4):
        row = np.arange(100) + 100 * part
        table = pa.table({"id": row, "half": (row / 2).astype(np.float32), "pair": [[i, -i] for i in row.tolist()]})
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=GROUP)
    return folder


def test_nothing_else_changes() -> None:
    changed = run("""
        import sys, types
        import pyarrow, pyarrow.parquet, pyarrow.fs, numpy, pandas
        def look():
            return {m.__name__: {name: id(v) for name, v in vars(m).items() if not isinstance(v, types.ModuleType)}
                    for m in (pyarrow, pyarrow.parquet, numpy, pandas)}
        before = look()
        from spark_hvd.estimators.petastorm.bridge import install
        install()
        import petastorm.pytorch, petastorm.spark, petastorm.etl.rowgroup_indexing
        import petastorm.weighted_sampling_reader, petastorm.etl.petastorm_generate_metadata
        stubs = {"pyarrow.filesystem", "pyarrow.hdfs", "pyarrow.LocalFileSystem"} & sys.modules.keys()
        names = ["petastorm.reader", "petastorm.unischema", "petastorm.fs_utils"]
        bound = [type(vars(sys.modules[n])[k]).__name__ for n, k in zip(names, ("pq", "np", "pyarrow"))]
        print(look() == before, stubs, bound)
    """)
    assert changed == "True set() ['Overlay', 'Overlay', 'Overlay']"


def test_after_an_import_without_it() -> None:
    text = run("""
        try:
            import petastorm
        except ImportError:
            pass
        from spark_hvd.estimators.petastorm.bridge import install
        try:
            install()
        except Exception as error:
            print(type(error).__name__, error)
    """)
    assert text.startswith("EstimatorError petastorm.")
    assert "before the bridge was installed" in text
    assert "install() before `import petastorm`" in text


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({}, r'petastorm is not installed in .*: pip install "petastorm>=0.12.1,<0.13"'),
        ({"petastorm": "0.13.1"}, r'petastorm 0.13.1 loses rows: .*: pip install "petastorm>=0.12.1,<0.13"'),
        ({"petastorm": "0.12.0"}, "petastorm 0.12.0 is older"),
        ({"petastorm": "0.12.1", "pandas": "3.0.1"}, r'pandas 3.0.1 reads null strings as the text "nan"'),
    ],
)
def test_versions_that_do_not_fit(versions: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, bridge._Finder)])
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(EstimatorError, match=text):
        bridge.install()


def test_installed_once() -> None:
    bridge.install()
    bridge.install()
    assert sum(isinstance(finder, bridge._Finder) for finder in sys.meta_path) == 1


def test_a_module_that_is_not_as_expected() -> None:
    class Empty:
        def exec_module(self, module: types.ModuleType) -> None:
            pass

    with pytest.raises(
        EstimatorError, match=r"petastorm.arrow_reader_worker has no pq, np, so it is not the Petastorm"
    ):
        bridge._Loader(Empty()).exec_module(types.ModuleType("petastorm.arrow_reader_worker"))


def test_values_of_every_type(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns: dict[str, pa.Array] = {
        name: pa.array([0, 1, 100], name) for name in ("int8", "int16", "int32", "int64", "uint8")
    }
    columns |= {"float32": pa.array([0, 1, 2.5], pa.float32()), "float64": pa.array([0, 1, 2.5])}
    columns |= {"bool": pa.array([True, False, True]), "text": pa.array(["a", "bc", ""]), "raw": pa.array([b"a"] * 3)}
    columns |= {"decimal": pa.array([decimal.Decimal("1.25")] * 3), "time": pa.array([when] * 3)}
    columns |= {"list": pa.array([[1.5, 2.5]] * 3, pa.list_(pa.float32()))}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    (batch,) = batches(url(tmp_path))
    for name, column in columns.items():
        if name == "time":
            assert batch.time.tolist() == [np.datetime64(when, "us").astype(batch.time.dtype).item()] * 3
        else:
            assert getattr(batch, name).tolist() == column.to_pylist()
    assert [str(getattr(batch, name).dtype) for name in ("int8", "uint8", "float32", "bool")] == [
        *("int8", "uint8", "float32", "bool")
    ]
    assert batch.list.dtype == np.float32


def test_nulls_are_petastorms_own(tmp_path: Path) -> None:
    """It silently converts them to NaN, so our reader counts them in Arrow."""
    table = pa.table({"int": pa.array([1, None]), "float": pa.array([None, 2.0]), "raw": pa.array([None, b"x"])})
    pq.write_table(table, tmp_path / "0.parquet")
    (batch,) = batches(url(tmp_path))
    np.testing.assert_array_equal(batch.int, [1, np.nan])
    np.testing.assert_array_equal(batch.float, [np.nan, 2])
    assert batch.raw.tolist() == [None, b"x"]


@pytest.mark.parametrize("workers", [1, 2, 4, 10])
def test_no_row_is_lost(numbers: Path, workers: int) -> None:
    for _ in range(8):
        assert sorted(ids(url(numbers), workers_count=workers, shuffle_row_groups=True)) == list(range(ROWS))


@pytest.mark.parametrize("pool", ["process", "dummy"])
def test_other_pools(numbers: Path, pool: str) -> None:
    options = {"reader_pool_type": pool, "workers_count": 1}  # a process needs seconds for imports
    assert sorted(ids(url(numbers), num_epochs=2, **options)) == sorted([*range(ROWS)] * 2)


def test_reading_again_with_reset(numbers: Path) -> None:
    with make_batch_reader(url(numbers), workers_count=3) as reader:
        for _ in range(5):
            assert sorted(int(i) for batch in reader for i in batch.id) == list(range(ROWS))
            reader.reset()


def test_rows_keep_together(numbers: Path) -> None:
    for batch in batches(url(numbers), shuffle_rows=True, seed=1):
        np.testing.assert_array_equal(batch.half, (batch.id / 2).astype(np.float32))
        np.testing.assert_array_equal(batch.pair, np.stack([batch.id, -batch.id], 1))


def test_transform(numbers: Path) -> None:
    def square(frame: pd.DataFrame) -> pd.DataFrame:
        frame["image"] = [np.full((2, 3), i, np.float32) for i in frame["id"]]
        return frame.drop(columns=["half"])

    spec = TransformSpec(square, edit_fields=[("image", np.float32, (2, 3), False)], removed_fields=["half"])
    (batch, *_) = batches(url(numbers), transform_spec=spec, workers_count=1)  # in file order
    assert set(batch._fields) == {"id", "pair", "image"}
    np.testing.assert_array_equal(batch.image, np.broadcast_to(np.arange(10)[:, None, None], (10, 2, 3)))


def test_predicates(numbers: Path) -> None:
    even = in_lambda(["id"], lambda values: values % 2 == 0)
    assert ids(url(numbers), predicate=even, workers_count=1) == list(range(0, ROWS, 2))
    none = in_lambda(["id"], lambda values: values < 0)
    assert ids(url(numbers), predicate=none) == []
    odd = in_negate(in_intersection([2, 4], "labels"))
    assert odd.do_include({"labels": [1, 3]})
    assert not odd.do_include({"labels": [1, 4]})


def test_seeds(numbers: Path) -> None:
    options = {"workers_count": 1, "shuffle_row_groups": True, "shuffle_rows": True}
    first = ids(url(numbers), seed=7, **options)
    assert first == ids(url(numbers), seed=7, **options)
    assert first != ids(url(numbers), seed=8, **options)
    assert sorted(first) == list(range(ROWS))
    assert {i // GROUP for i in first[:GROUP]} == {first[0] // GROUP}  # whole row groups, in another order


def test_shards(numbers: Path) -> None:
    shards = [ids(url(numbers), cur_shard=shard, shard_count=3, seed=0) for shard in range(3)]
    assert sorted(itertools.chain(*shards)) == list(range(ROWS))
    assert [len(shard) for shard in shards] == [140, 130, 130]


def test_disk_cache(numbers: Path, tmp_path: Path) -> None:
    options = {"cache_type": "local-disk", "cache_location": str(tmp_path), "cache_size_limit": 10**9}
    options |= {"cache_row_size_estimate": 100, "num_epochs": 3, "cache_extra_settings": {"cleanup": True}}
    assert sorted(ids(url(numbers), **options)) == sorted([*range(ROWS)] * 3)


@pytest.mark.parametrize("loader", [DataLoader, BatchedDataLoader])
@pytest.mark.parametrize("capacity", [0, 100])
def test_loaders(numbers: Path, loader: Any, capacity: int) -> None:
    reader = make_batch_reader(url(numbers), workers_count=2, schema_fields=["id", "half"])
    with loader(reader, batch_size=64, shuffling_queue_capacity=capacity) as loaded:
        found = list(loaded)
    assert [len(batch["id"]) for batch in found] == [64] * 6 + [16]
    row = torch.cat([torch.as_tensor(batch["id"]) for batch in found])
    assert sorted(row.tolist()) == list(range(ROWS))
    assert torch.equal(torch.cat([torch.as_tensor(batch["half"]) for batch in found]), row.float() / 2)


def test_loader_in_memory(numbers: Path) -> None:
    reader = make_batch_reader(url(numbers), workers_count=2, schema_fields=["id"], num_epochs=1)
    loader = InMemBatchedDataLoader(reader, batch_size=100, num_epochs=2, rows_capacity=ROWS, shuffle=False)
    assert sorted(i for batch in loader for i in batch["id"].tolist()) == sorted([*range(ROWS)] * 2)


@pytest.mark.parametrize("levels", [("year",), ("year", "name")])
def test_directories_that_hold_columns(tmp_path: Path, levels: tuple[str, ...]) -> None:
    table = pa.table({"id": range(12), "year": [2024, 2025, 2026] * 4, "name": ["a b", "c"] * 6})
    pq.write_to_dataset(table, tmp_path, partition_cols=list(levels))
    found = batches(url(tmp_path))
    seen = [(int(i), int(year), str(name)) for b in found for i, year, name in zip(b.id, b.year, b.name, strict=True)]
    assert sorted(seen) == [(i, (2024, 2025, 2026)[i % 3], ("a b", "c")[i % 2]) for i in range(12)]
    assert sorted(ids(url(tmp_path), filters=[("year", ">=", 2025)])) == [i for i in range(12) if i % 3]
    either = [[("year", "=", 2024)], [("year", "in", {2026})]]
    assert sorted(ids(url(tmp_path), filters=either)) == [i for i in range(12) if i % 3 != 1]
    if len(levels) == 1:
        predicate = in_lambda(["year"], lambda value: value == 2026)
        assert sorted(ids(url(tmp_path), predicate=predicate)) == [2, 5, 8, 11]


def test_what_is_no_data(tmp_path: Path) -> None:
    for name in ("_temporary", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.parquet").write_text("no Parquet")
    for name in ("_SUCCESS", ".part.crc", "_started_1"):
        (tmp_path / name).touch()
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "0.parquet")
    assert ids(url(tmp_path)) == [1, 2]
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        ids(url(tmp_path / "nowhere"))


def test_lists_of_files_and_file_systems(numbers: Path) -> None:
    assert ids([url(numbers / "part-2.parquet"), url(numbers / "part-0.parquet")], workers_count=1) == [
        *range(200, 300),
        *range(100),
    ]
    assert len(ids(url(numbers / "part-1.parquet"))) == 100
    assert sorted(ids(url(numbers), filesystem=pyarrow.fs.LocalFileSystem())) == list(range(ROWS))


def test_memory() -> None:
    import fsspec

    folder = f"bucket/{uuid.uuid4().hex}"
    with fsspec.open(f"memory://{folder}/0.parquet", "wb") as file:
        pq.write_table(pa.table({"id": range(30)}), file, row_group_size=7)
    assert sorted(ids(f"memory://{folder}")) == list(range(30))


def test_a_schema_of_years_ago() -> None:
    """Python 2 had other names for numpy's types, and pyspark pickled named tuples by value."""
    from petastorm.etl.legacy import depickle_legacy_package_name_compatible as load

    names = b"(S'name'\nS'numpy_dtype'\nS'shape'\nS'codec'\nS'nullable'\nt"
    found = load(
        b"cpyspark.serializers\n_restore\n(S'UnischemaField'\n" + names + b"(S'f'\ncnumpy\nunicode_\n(tNI00\nttR."
    )
    assert isinstance(found, UnischemaField)
    assert (found.name, found.numpy_dtype, found.shape, found.nullable) == ("f", np.str_, (), False)
    with pytest.raises(Exception, match="forbidden"):
        load(b"cos\nsystem\n(S'true'\ntR.")


def test_images(capfd: pytest.CaptureFixture[str]) -> None:
    """JPEG in the requested quality, PNG unchanged; OpenCV prints nothing about either."""
    field = UnischemaField("image", np.uint8, (64, 64), None, False)
    image = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    png = CompressedImageCodec("png")
    np.testing.assert_array_equal(png.decode(field, png.encode(field, image)), image)
    sizes = [len(CompressedImageCodec("jpeg", quality).encode(field, image)) for quality in (10, 90)]
    assert sizes[0] < sizes[1] / 2
    assert capfd.readouterr().err == ""


def test_no_warning_of_ours(numbers: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"spark_hvd\.")
        assert len(ids(url(numbers))) == ROWS
