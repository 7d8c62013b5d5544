"""What readers make of values: dtypes, nulls, decoders, ``transformation_fn``, and batches that are dicts."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.store import Store
from tests.contract.reader_data import arrow, every, local, no_thread_stays, numbered, opened, read, rows, write


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_stays():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return local(tmp_path)


@every
def test_dtypes_by_value(kind: str, store: Store) -> None:
    expected: dict[str, list[Any]] = {
        name: [0, 1, 100] for name in ("int8", "int16", "int32", "int64", "uint8", "float32", "float64")
    }
    table = pa.table(
        {
            name: pa.array(values, name if "float" not in name else getattr(pa, name)())
            for name, values in expected.items()
        }
        | {
            "bool": pa.array([True, False, True]),
            "list": pa.array([[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32())),
            "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        }
    )
    (batch,) = read(opened(kind, write(store, table, 1, 2), store))
    expected |= {"bool": [True, False, True]}
    expected |= {"list": [[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]], "fixed": [[1, 2], [3, 4], [5, 6]]}
    dtypes = {name: getattr(torch, name) for name in expected if hasattr(torch, name)}
    dtypes |= {"list": torch.float32, "fixed": torch.int64}
    assert {name: batch[name].tolist() for name in batch} == expected
    assert {name: batch[name].dtype for name in batch} == dtypes


@arrow
def test_values_that_need_a_conversion(kind: str, store: Store) -> None:
    sparse = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})
    table = pa.table(
        {
            "double": pa.array([0.5, 1.5, 2.5]),
            "decimal": pa.array([decimal.Decimal("1.25")] * 3),
            "image": pa.array([[[1, 2, 3], [4, 5, 6]]] * 3, pa.list_(pa.list_(pa.int8()))),
            "flat": pa.array([[1, 2, 3, 4]] * 3, pa.large_list(pa.float32())),
            "sparse": pa.array(
                [{"size": 4, "indices": [i], "values": [9.0]} for i in (0, 1)]
                + [{"size": None, "indices": None, "values": [1.0, 2.0, 3.0, 4.0]}],
                sparse,
            ),
        }
    )
    columns = [
        Column("double", "float32"),
        Column("decimal", "float64"),
        Column("image", "uint8", (2, 3)),
        Column("flat", "float32", (2, 2)),
        Column("sparse", "float32", (4,), "vector", "sparse"),
    ]
    (batch,) = read(opened(kind, write(store, table, 1, 3, columns), store))
    assert batch["double"].tolist() == [0.5, 1.5, 2.5]
    assert batch["double"].dtype == torch.float32
    assert batch["decimal"].tolist() == [1.25] * 3
    assert batch["image"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 3
    assert batch["image"].dtype == torch.uint8
    assert batch["flat"].tolist() == [[[1, 2], [3, 4]]] * 3
    assert batch["sparse"].tolist() == [[9, 0, 0, 0], [0, 9, 0, 0], [1, 2, 3, 4]]


@arrow
@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float16", "bfloat16", "bool"])
def test_rarer_dtypes_shuffled(kind: str, store: Store, name: str) -> None:
    row = np.arange(20)
    stored = row.astype("float32" if name == "bfloat16" else name)
    table = pa.table({"row": row, "x": stored, "y": stored})
    meta = write(store, table, 1, 6, [Column("row", "int64"), Column("x", name), Column("y", name)])
    for batch in read(opened(kind, meta, store, shuffle=True)):
        assert batch["x"].dtype == batch["y"].dtype == getattr(torch, name)
        assert batch["x"].tolist() == batch["y"].tolist() == stored[batch["row"].numpy()].tolist()


@arrow
def test_names_with_dots(kind: str, store: Store) -> None:
    table = pa.table({"a.b": [1, 2], "a": [3, 4]})
    (batch,) = read(opened(kind, write(store, table), store, columns=("a.b", "a")))
    assert {name: values.tolist() for name, values in batch.items()} == {"a.b": [1, 2], "a": [3, 4]}


@every
def test_nulls_are_named(kind: str, store: Store) -> None:
    table = pa.table({"row": pa.array([0, 1, 2, None, 4, None])})
    with pytest.raises(
        DataError,
        match=r"column 'row'.*part-00000.parquet, row group 1 has 2 null.* in 3 rows, the first in row 0: fill or drop",
    ):
        read(opened(kind, write(store, table, 1, 3), store))


@arrow
def test_ragged_lists_are_named(kind: str, store: Store) -> None:
    table = pa.table({"x": pa.array([[1.0, 2.0]] * 4 + [[1.0]] + [[1.0, 2.0]])})
    with pytest.raises(DataError, match=r"column 'x'.*row group 1.*different lengths: row 1 has one of 1"):
        read(opened(kind, write(store, table, 1, 3), store))


@arrow
@pytest.mark.parametrize("shuffle", [False, True])
def test_row_groups_must_be_alike(kind: str, store: Store, shuffle: bool) -> None:
    meta = write(store, pa.table({"x": pa.array([[1.0, 2.0]] * 3 + [[1.0]] * 3)}), 1, 3)
    with pytest.raises(DataError, match=r"column 'x' in .* has rows of shape \([12],\) and torch"):
        read(opened(kind, meta, store, shuffle=shuffle))


@arrow
def test_a_type_without_a_tensor(kind: str, store: Store) -> None:
    table = pa.table({"t": [datetime.datetime(2026, 1, 1)]})
    meta = write(store, table, columns=[Column("t", "int64")])
    with pytest.raises(DataError, match=r"column 't' in .* holds timestamp"):
        read(opened(kind, meta, store))


@arrow
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_stays_text_where_it_is_asked_for(kind: str, store: Store, type_: pa.DataType) -> None:
    words = [f"ü {number}" if number % 3 else "" for number in range(40)]
    table = numbered(40).append_column("word", pa.array(words).cast(type_))
    columns = [*(Column(name, "float32") for name in ("half", "other")), Column("row", "int64")]
    meta = write(store, table, 2, columns=[*columns, Column("word", "object", None, "string")])
    for shuffle in (False, True):
        batches = read(opened(kind, meta, store, text=("word",), shuffle=shuffle))
        assert [(batch["word"].dtype, batch["half"].dtype) for batch in batches] == [(object, torch.float32)] * 6
        assert rows(batches, "word") == [words[row] for row in rows(batches)]
    louder = opened(
        kind, meta, store, text=("word",), transformation_fn=lambda frame: frame.assign(word=frame.word + "!")
    )
    assert rows(read(louder), "word") == [f"{word}!" for word in words]
    with pytest.raises(DataError, match=r"column 'word' .*cannot become a tensor"):
        read(opened(kind, meta, store, text=("row",)))


@arrow
def test_text_with_nulls_or_bytes_in_it(kind: str, store: Store) -> None:
    column = [Column("word", "object", None)]
    holes = write(store, pa.table({"word": pa.array(["a", None, "b", None])}), columns=column)
    with pytest.raises(DataError, match=r"column 'word' in a batch has 2 null\(s\) in 4 rows"):
        read(opened(kind, holes, store, text=("word",)))
    filled = opened(kind, holes, store, text=("word",), transformation_fn=lambda frame: frame.fillna({"word": "?"}))
    assert rows(read(filled), "word") == ["a", "?", "b", "?"]
    octets = write(store, pa.table({"word": pa.array([b"a", b"b"])}), columns=column)
    with pytest.raises(DataError, match=r"column 'word' .* in row 0: expected numbers"):
        read(opened(kind, octets, store, text=("word",)))


@every
def test_decoders(kind: str, store: Store) -> None:
    table = pa.table({"row": [0, 1, 2], "raw": [bytes([i, i + 1]) for i in range(3)]})
    decoders = {"raw": lambda value: np.frombuffer(value, np.uint8)}
    (batch,) = read(opened(kind, write(store, table), store, decoders=decoders))
    assert batch["raw"].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert batch["raw"].dtype == torch.uint8


@arrow
def test_decoders_that_fail(kind: str, store: Store) -> None:
    table = pa.table({"raw": [b"a", b"bb", b""]})
    meta = write(store, table)
    with pytest.raises(DataError, match=r"decoder of column 'raw' failed on row 2 of .*, 0 bytes: IndexError"):
        read(opened(kind, meta, store, decoders={"raw": lambda value: np.array(value[0])}))
    with pytest.raises(DataError, match=r"column 'raw' in .* has shape \(2,\) in row 1"):
        read(opened(kind, meta, store, decoders={"raw": lambda value: np.frombuffer(value, np.uint8)}))
    with pytest.raises(DataError, match=r"column 'raw' .*pass a decoder"):
        read(opened(kind, meta, store))


@every
def test_transformation(kind: str, store: Store) -> None:
    def transform(frame: pd.DataFrame) -> pd.DataFrame:
        frame["pair"] = [np.array([value, value + 1], np.float32) for value in frame["row"]]
        frame["half"] = frame["half"] * 2
        return frame.drop(columns=["other"])

    spec = {"edit_fields": (("pair", np.float32, (2,), False),), "removed_fields": ("other",)}
    reader = opened(kind, write(store, numbered(20), 1, 6), store, transformation_fn=transform, **spec)
    batches = read(reader)
    assert {name: tuple(batches[0][name].shape) for name in batches[0]} == {"row": (7,), "half": (7,), "pair": (7, 2)}
    assert rows(batches, "half") == list(range(20))
    assert rows(batches, "pair") == [[i, i + 1] for i in range(20)]
    reader.close()


@arrow
def test_transformation_may_fill_nulls_and_use_bytes(kind: str, store: Store) -> None:
    table = pa.table({"x": pa.array([1.0, None, 3.0]), "raw": [b"a", b"bb", b"ccc"], "v": [[1.0, 2.0]] * 3})

    def transform(frame: pd.DataFrame) -> pd.DataFrame:
        assert [value.shape for value in frame["v"]] == [(2,)] * len(frame)
        return frame.assign(x=frame["x"].fillna(7), raw=[len(value) for value in frame["raw"]])

    spec = {"transformation_fn": transform, "edit_fields": (("raw", "int64", (), False),)}
    (batch,) = read(opened(kind, write(store, table), store, **spec))
    assert batch["x"].tolist() == [1, 7, 3]
    assert batch["raw"].tolist() == [1, 2, 3]
    assert batch["raw"].dtype == torch.int64
    assert batch["v"].tolist() == [[1, 2]] * 3


@arrow
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda frame: frame[1:], "returned 9 rows for 10 of .*row group 0"),
        (lambda frame: frame.drop(columns=["half"]), "returned no column 'half', but 'row', 'other'"),
        (lambda frame: frame["row"], "returned Series, expected a pandas DataFrame"),
        (lambda frame: frame["nope"], "transformation_fn failed on .*row group 0: KeyError: 'nope'"),
        (
            lambda frame: frame.assign(row="text"),
            "column 'row' .* (has 'text' in row 0|holds string: expected numbers)",
        ),
        (lambda frame: frame.assign(row=0.5), "column 'row' .* does not fit int64"),
        (
            lambda frame: frame.assign(half=[np.zeros(2)] * 10),
            r"column 'half' .* has rows of shape \(2,\), expected \(\)",
        ),
    ],
)
def test_transformation_that_breaks_the_rules(kind: str, store: Store, function: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        read(opened(kind, write(store, numbered(30)), store, transformation_fn=function))


@arrow
def test_a_batch_is_a_dict(kind: str, store: Store) -> None:
    (batch,) = read(opened(kind, write(store, numbered(4)), store, columns=("half", "row", "other")))
    assert type(batch) is dict
    assert list(batch) == ["half", "row", "other"]
    # Columns of one dtype are views of one matrix.
    assert batch["half"].untyped_storage().data_ptr() == batch["other"].untyped_storage().data_ptr()
