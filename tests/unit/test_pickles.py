"""Code that was pickled by value knows its file with any cloudpickle: ranks' tracebacks show its lines."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from spark_hvd.estimators.training.packing import pack, unpack
from spark_hvd.runner.outcome.payload import dump_call, dump_result
from spark_hvd.world.pickles import dumps


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def outer() -> None:
    def inner() -> None:
        raise ValueError("this very line")

    inner()


class Model:
    def fails(self) -> None:
        outer()


WAYS: dict[str, Callable[[Any], Any]] = {
    "dumps": lambda value: pickle.loads(dumps(value)),
    "call": lambda value: pickle.loads(dump_call(value, (), {}))[0],
    "result": lambda value: pickle.loads(dump_result(value, 0)),
    "packed": lambda value: unpack(pack(value)),
}


@pytest.mark.parametrize("way", WAYS)
def test_tracebacks_show_lines(way: str) -> None:
    with pytest.raises(ValueError, match="this very line") as caught:
        WAYS[way](Model().fails)()
    text = "".join(traceback.format_exception(caught.value))
    assert text.count(f'File "{__file__}"') >= 4
    assert 'raise ValueError("this very line")' in text


def test_young_dtypes_travel() -> None:
    base = torch.arange(6.0).to(torch.float8_e4m3fn).view(2, 3)
    for tensor in (base, base[:, 1], base[:0], torch.ones(2).to(torch.float8_e8m0fnu)):
        again = pickle.loads(dumps({"deep": [tensor]}))["deep"][0]
        assert again.dtype == tensor.dtype
        assert torch.equal(again.float(), tensor.float())


def test_a_view_travels_without_the_rest_of_its_storage() -> None:
    bucket = torch.arange(50_000.0)
    model = torch.nn.Linear(2, 2)
    model.weight.grad = bucket[8:12].view(2, 2)
    views = [bucket[1:3], bucket[4:6].requires_grad_(), bucket[::25_000], bucket[:0], bucket[7], bucket[0].expand(9)]
    views += [torch.nn.Parameter(bucket[20:22]), bucket.bool()[:2], bucket.to(torch.complex64).conj()[1:3]]
    data = dumps([views, model, model.weight.grad])
    assert len(data) < 10_000
    again, _, gradient = pickle.loads(data)
    assert torch.equal(gradient, model.weight.grad)
    for was, now in zip(views, again, strict=True):
        assert (type(now), now.dtype, now.shape, now.requires_grad) == (
            type(was),
            was.dtype,
            was.shape,
            was.requires_grad,
        )
        assert torch.equal(now, was)
    tied = torch.nn.Parameter(bucket[:2])
    first, second = pickle.loads(dumps([tied, tied]))
    assert first is second


def test_a_generator_is_no_function_to_run() -> None:
    def epochs() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"fn=epochs is a generator.*return a list"):
        dump_call(epochs, (), {})
