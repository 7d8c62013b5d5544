"""What every reader does: each row once per pass, equal steps, an order decided by a seed, no remaining thread."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from spark_hvd.data.readers import blocks
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.sharding import batch_rows, steps_of
from spark_hvd.estimators.training.inputs import TensorSpec, tensors_of
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
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("total", "files", "group_rows", "size", "batch_size"),
    [
        (1, 1, 1, 1, 1),
        (100, 1, 100, 3, 7),
        (101, 4, 10, 2, 10),
        (97, 3, 5, 5, 64),
        (50, 5, 3, 7, 1),
        (64, 2, 8, 4, 16),
        (99, 1, 99, 1, 2),
    ],
)
def test_each_row_once_over_all_ranks(
    kind: str, store: Store, total: int, files: int, group_rows: int, size: int, batch_size: int, shuffle: bool
) -> None:
    meta = write(store, numbered(total), files, group_rows)
    for number in (0, 1):
        seen = []
        for rank in range(size):
            reader = opened(kind, meta, store, batch_size, rank=rank, size=size, shuffle=shuffle, seed=5)
            batches = read(reader, number)
            reader.close()
            assert [len(batch["row"]) for batch in batches] == batch_rows(total, rank, size, batch_size)
            assert len(batches) == steps_of(total, size, batch_size)
            for batch in batches:  # a row stays a row
                assert torch.equal(batch["half"], batch["row"].to(torch.float32) / 2)
                assert torch.equal(batch["other"], -batch["row"].to(torch.float32))
            seen += rows(batches)
        assert sorted(seen) == list(range(total))


@every
def test_order_of_the_files_without_shuffling(kind: str, store: Store) -> None:
    meta = write(store, numbered(60), 3, 7)
    assert rows(read(opened(kind, meta, store))) == list(range(60))
    assert rows(read(opened(kind, meta, store, rank=1, size=2))) == list(range(30, 60))


@every
def test_seed_and_pass_decide_the_order(kind: str, store: Store) -> None:
    meta = write(store, numbered(200), 4, 10)
    reader = opened(kind, meta, store, shuffle=True, seed=3, window_rows=50)
    first, again = read(reader, 0), read(reader, 0)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, again, strict=True) for name in a)
    assert rows(read(opened(kind, meta, store, shuffle=True, seed=3, window_rows=50, workers=1))) == rows(first)
    assert rows(first) != list(range(200))
    assert rows(read(reader, 1)) != rows(first)
    assert rows(read(opened(kind, meta, store, shuffle=True, seed=4, window_rows=50))) != rows(first)
    near = np.abs(np.diff(rows(first))) == 1
    assert near.sum() < 30  # of 199 neighbours; files in order would have all


@every
def test_drop_last(kind: str, store: Store) -> None:
    meta = write(store, numbered(50), 2, 10)
    batches = read(opened(kind, meta, store, 8, rank=1, size=2, drop_last=True))
    assert [len(batch["row"]) for batch in batches] == [8, 8, 8]
    assert rows(batches) == list(range(25, 49))


@every
def test_only_the_columns_asked_for_in_their_order(kind: str, store: Store) -> None:
    (batch,) = read(opened(kind, write(store, numbered(5)), store, columns=("other", "row")))
    assert list(batch) == ["other", "row"]


@every
@pytest.mark.parametrize("group_rows", [20, 7])
def test_a_column_of_a_batch_may_be_changed_by_what_has_a_gradient(kind: str, store: Store, group_rows: int) -> None:
    reader = opened(kind, write(store, numbered(20), 1, group_rows), store, 5)
    batches, weight = read(reader), torch.full((5,), 3.0, requires_grad=True)
    changed = batches[1].pop("half").mul_(weight)
    assert changed.tolist() == [3 * row / 2 for row in range(5, 10)]
    assert changed.requires_grad
    assert not any(tensor.requires_grad for batch in batches for tensor in batch.values())
    assert rows([*batches[:1], *batches[2:]], "half") == [row / 2 for row in range(20) if row // 5 != 1]
    reader.close()


@every
@pytest.mark.parametrize("shuffle", [False, True])
def test_columns_that_a_model_takes_side_by_side_are_one_tensor(kind: str, store: Store, shuffle: bool) -> None:
    table = numbered(40).append_column("last", pa.array(range(40), pa.float32())).add_column(0, "first", [range(40)])
    meta = write(store, table, 2, 7)
    asked: dict[str, Any] = {"batch_size": 9, "shuffle": shuffle, "seed": 5, "window_rows": 20}
    apart = read(opened(kind, meta, store, **asked))
    for stack in (("last", "other"), ("row", "first"), ("half", "row"), ("half",)):
        specs = [TensorSpec(meta.column(name), stacked=True) for name in stack]
        together = read(opened(kind, meta, store, stack=stack, **asked))
        expected = [tensors_of(specs, batch)[0] for batch in apart]
        for batch, columns, inputs in zip(together, apart, expected, strict=True):
            (found,) = tensors_of(specs, batch)
            assert found.dtype == inputs.dtype
            assert found.is_contiguous()
            assert torch.equal(found, inputs)
            rest = [name for name in columns if name not in stack]
            assert all(torch.equal(batch[name], columns[name]) for name in rest)
            if stack[-1] not in batch:
                place = min(map(list(columns).index, stack))
                assert list(batch) == [*rest[:place], "features", *rest[place:]]
                assert batch["features"]._version == 0
                batch["features"].zero_()  # of this batch alone
        assert ("features" in together[0]) == (stack in (("last", "other"), ("row", "first")))


@every
@pytest.mark.parametrize("shuffle", [False, True])
def test_left_early(kind: str, store: Store, shuffle: bool) -> None:
    reader = opened(kind, write(store, numbered(500), 2, 5), store, shuffle=shuffle, window_rows=20)
    batches = reader.batches(0)
    assert len(next(batches)["row"]) == 7
    batches.close()  # type: ignore[attr-defined]
    next(reader.batches(1))  # no reference is left to this one
    assert len(rows(read(reader, 2))) == 500
    reader.close()
    reader.close()


@every
def test_an_iterator_that_nobody_holds_leaves_no_thread(kind: str, store: Store) -> None:
    reader = opened(kind, write(store, numbered(500), 2, 5), store)
    before = threading.active_count()
    batches = reader.batches(0)
    next(batches)
    del batches
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    reader.close()


@arrow
def test_closed_while_batches_are_read(kind: str, store: Store) -> None:
    reader = opened(kind, write(store, numbered(500), 2, 5), store)
    batches = reader.batches(0)
    next(batches)
    reader.close()
    with pytest.raises(RuntimeError, match="the reader was closed"):
        list(batches)
    with pytest.raises(RuntimeError, match="the reader is closed"):
        read(reader)


@every
def test_memory_store(kind: str) -> None:
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    assert rows(read(opened(kind, write(store, numbered(40), 2, 6), store))) == list(range(40))


@every
def test_a_file_that_vanished(kind: str, store: Store) -> None:
    meta = write(store, numbered(40), 2, 10)
    store.delete(meta.row_groups[-1].file)
    reader = opened(kind, meta, store)
    with pytest.raises(DataError, match=r"part-00001.parquet"):
        read(reader)


@arrow
def test_a_file_that_changed(kind: str, store: Store) -> None:
    meta = write(store, numbered(40), 1, 10)
    write(store, numbered(40), 1, 8)
    with pytest.raises(DataError, match=r"part-00000.parquet, row group 0 has 8 rows, expected 10: the file changed"):
        read(opened(kind, meta, store))
    write(store, numbered(40).drop_columns(["half"]), 1, 10)
    with pytest.raises(DataError, match=r"part-00000.parquet, row group 0 has no column 'half'"):
        read(opened(kind, meta, store))
    store.write_bytes(meta.row_groups[0].file, b"PAR1 no more")
    with pytest.raises(DataError, match=r"cannot read .*part-00000.parquet, row group 0: ArrowInvalid"):
        read(opened(kind, meta, store))


@every
def test_a_column_that_is_not_there(kind: str, store: Store) -> None:
    with pytest.raises(DataError, match="column 'nope' is not in"):
        opened(kind, write(store, numbered(4)), store, columns=("nope",))


@every
@pytest.mark.parametrize("shuffle", [False, True])
def test_cache_reads_files_once(kind: str, store: Store, shuffle: bool) -> None:
    meta = write(store, numbered(100), 2, 10)
    readers = [opened(kind, meta, store, rank=r, size=3, shuffle=shuffle, cache=True) for r in range(3)]
    passes = [[rows(read(reader, 0)) for reader in readers]]
    store.delete(meta.url)
    for number in (1, 2):
        passes.append([rows(read(reader, number)) for reader in readers])
    for shards in passes:
        assert sorted(itertools.chain.from_iterable(shards)) == list(range(100))
    assert (passes[1] == passes[2]) is not shuffle
    for reader in readers:
        reader.close()


@arrow
def test_what_a_consumer_changes_is_not_in_the_cache(kind: str, store: Store) -> None:
    reader = opened(kind, write(store, numbered(20), 1, 5), store, cache=True)
    for batch in reader.batches(0):
        batch["row"].zero_()
    assert rows(read(reader, 1)) == list(range(20))


@arrow
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_row_groups_larger_than_a_window(kind: str, store: Store, shuffle: bool, cache: bool) -> None:
    meta = write(store, numbered(1000), 2, 400)
    seen = []
    for rank in range(3):
        reader = opened(
            kind, meta, store, 32, rank=rank, size=3, shuffle=shuffle, window_rows=90, workers=4, cache=cache
        )
        next(reader.batches(0))  # left early: some parts are kept, others not
        seen += rows(read(reader, 0))
        reader.close()
    assert sorted(seen) == list(range(1000))
    assert (seen == list(range(1000))) is not shuffle


@arrow
def test_a_row_group_of_two_windows_is_converted_once(kind: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []
    of = blocks.TensorForm.of

    def counted(form: blocks.TensorForm, table: pa.Table, where: str) -> Any:
        converted.append(where)
        return of(form, table, where)

    monkeypatch.setattr(blocks.TensorForm, "of", counted)
    meta = write(store, numbered(2000), 4, 50)
    reader = opened(kind, meta, store, 16, shuffle=True, window_rows=240, columns=("row",))  # four lanes of 32 rows
    assert sorted(rows(reader.batches(0))) == list(range(2000))
    assert len(converted) == len(set(converted)) == 40


@arrow
def test_a_window_bounds_what_is_in_memory(kind: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, empty = 0, blocks._empty

    def counted(like: torch.Tensor, rows: int) -> Any:
        nonlocal most
        block = empty(like, rows)
        alive.add(block)
        most = max(most, sum(len(each) for each in alive))
        return block

    monkeypatch.setattr(blocks, "_empty", counted)
    meta = write(store, numbered(2000), 4, 10)
    for batch in opened(kind, meta, store, 16, shuffle=True, window_rows=100, columns=("row",)).batches(0):
        assert len(batch["row"]) == 16
        time.sleep(0.001)  # time for the reader to read ahead
    assert 100 <= most <= 300
