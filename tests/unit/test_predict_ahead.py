"""What is prepared for a model while it computes: how much, in what order, and what remains."""

from __future__ import annotations

import gc
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.declared import declared_outputs
from spark_hvd.estimators.transform.feeds import CollatedFeed, TensorFeed
from spark_hvd.estimators.transform.models import ModelSource
from spark_hvd.estimators.transform.predict import Prediction, predictions

LONG = 60.0
THREAD = "spark_hvd-predict"


def job_of(model: Callable[..., Any], collate: Callable[..., Any], window: int | None = None) -> Prediction:
    """Return a job with calls of two rows each."""
    return Prediction(
        model=ModelSource(uuid.uuid4().hex, loader=lambda: model),
        feed=CollatedFeed(("x",), collate, window=window),
        plan=declared_outputs("bigint"),
        outputs=None,
        head=Head("other"),
        batch_size=2,
        use_gpu=False,
    )


def batches(*lengths: int) -> Iterator[pa.Array]:
    """Return the numbers from 0, in batches of these lengths."""
    start = 0
    for length in lengths:
        rows = pa.array(range(start, start + length), pa.int64())
        start += length
        yield pa.StructArray.from_arrays([rows], names=["x"])


def numbers(results: Iterator[pa.Array]) -> list[list[int]]:
    return [result.field(0).to_pylist() for result in results]


def in_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.mark.parametrize("lengths", [(6,), (2, 2, 2), (2, 0, 4)], ids=str)
def test_the_next_batch_is_made_while_the_model_computes(lengths: tuple[int, ...]) -> None:
    made = {number: threading.Event() for number in (0, 2, 4)}

    def collate(values: list[int]) -> torch.Tensor:
        made[values[0]].set()
        return torch.tensor(values)

    def model(values: torch.Tensor) -> torch.Tensor:
        following = made.get(int(values[0]) + 2)
        assert following is None or following.wait(LONG)
        return 10 * values

    found = numbers(predictions(job_of(model, collate), batches(*lengths)))
    assert [len(each) for each in found] == list(lengths)
    assert [number for each in found for number in each] == [0, 10, 20, 30, 40, 50]
    assert not in_threads()


def test_no_more_than_a_few_batches_are_made_ahead() -> None:
    read, collated, most = [], [], []

    def collate(values: list[int]) -> torch.Tensor:
        collated.append(values)
        return torch.tensor(values)

    def model(values: torch.Tensor) -> torch.Tensor:
        done = int(values[0]) // 2 + 1
        most.append((len(collated) - done, len(read) - done))
        return values

    def reading() -> Iterator[pa.Array]:
        for batch in batches(*[2] * 20):
            read.append(batch)
            yield batch

    assert numbers(predictions(job_of(model, collate), reading())) == [[at, at + 1] for at in range(0, 40, 2)]
    assert max(made for made, _ in most) <= 2
    assert max(taken for _, taken in most) <= 2


def test_rows_of_a_window_are_decoded_batch_by_batch() -> None:
    decoded, most = [], []

    def decoder(value: bytes) -> int:
        decoded.append(value)
        return value[0]

    def model(values: torch.Tensor) -> torch.Tensor:
        most.append(len(decoded) // 2 - int(values[0]) // 2 - 1)
        return values

    feed = TensorFeed((TensorSpec(Column("x", "object")),), {"x": decoder})
    rows = pa.StructArray.from_arrays([pa.array([bytes([number]) for number in range(20)])], names=["x"])
    job = replace(job_of(model, torch.tensor), feed=feed)
    assert numbers(predictions(job, iter([rows]))) == [list(range(20))]
    assert len(most) == 10
    assert max(most) <= 2


def test_all_batches_of_a_window_have_rows_of_one_shape() -> None:
    feed = TensorFeed((TensorSpec(Column("x", "object")),), {"x": lambda value: np.frombuffer(value, np.uint8)})
    rows = pa.StructArray.from_arrays([pa.array([b"a", b"b", b"cc"])], names=["x"])
    job = replace(job_of(lambda values: values[:, 0].long(), torch.tensor), feed=feed)
    with pytest.raises(DataError, match=r"column 'x' in transform has shape \(2,\) in row 2, but \(1,\) in row 0"):
        list(predictions(job, iter([rows])))


@pytest.mark.parametrize("rows", [2, 5])
def test_a_window_goes_with_its_last_call(rows: int) -> None:
    read: list[weakref.ref[Any]] = []
    collated: list[weakref.ref[Any]] = []

    def noted(batch: pa.Array) -> pa.Array:
        read.append(weakref.ref(batch))
        return batch

    def collate(values: list[int]) -> torch.Tensor:
        made = torch.tensor(values)
        collated.append(weakref.ref(made))
        return made

    def alive(refs: list[weakref.ref[Any]]) -> int:
        return sum(ref() is not None for ref in refs)

    gc.disable()
    try:
        for _ in predictions(job_of(lambda values: 10 * values, collate), map(noted, batches(*[rows] * 8))):
            assert alive(read) <= 4
            assert alive(collated) <= 4
        assert alive(read) + alive(collated) == 0
    finally:
        gc.enable()
    assert len(read) == 8


def test_what_comes_before_an_error_is_given_and_nothing_is_left() -> None:
    def collate(values: list[int]) -> torch.Tensor:
        if 4 in values:
            raise ValueError("no picture")
        return torch.tensor(values)

    results = predictions(job_of(lambda values: values, collate), batches(2, 2, 2, 2))
    assert [next(results).field(0).to_pylist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ModelError, match="collate failed on 2 values of 'x': ValueError: no picture"):
        next(results)
    assert not in_threads()


def test_the_model_that_fails_or_is_left_leaves_no_thread() -> None:
    def model(values: torch.Tensor) -> torch.Tensor:
        if 2 in values:
            raise ValueError("broken")
        return values

    results = predictions(job_of(model, torch.tensor), batches(2, 2, 2))
    assert next(results).field(0).to_pylist() == [0, 1]
    with pytest.raises(ModelError, match="broken"):
        next(results)
    assert not in_threads()
    left = predictions(job_of(lambda values: values, torch.tensor), batches(2, 2, 2))
    next(left)
    assert in_threads()
    left.close()
    assert not in_threads()


def test_rows_of_a_window_are_sorted_and_put_back() -> None:
    texts = pa.array(["a", "bbbb", "cc", "ddddd", "eee", "f", "g"])
    sizes = []

    def collate(values: list[str]) -> torch.Tensor:
        sizes.append([len(value) for value in values])
        return torch.tensor([len(value) for value in values])

    given = iter([pa.StructArray.from_arrays([texts[:4]], names=["x"]), pa.StructArray.from_arrays([texts[4:]], ["x"])])
    assert numbers(predictions(job_of(lambda values: values, collate, window=5), given)) == [[1, 4, 2, 5, 3], [1, 1]]
    assert sizes == [[5, 4], [3, 2], [1], [1, 1]]
