"""spark_hvd.predict: models, loaders, text in windows, outputs of every kind; messages about mistakes."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml.linalg import DenseVector
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, FloatType
from torch import nn

import spark_hvd
from spark_hvd.data.readers.errors import DataError
from spark_hvd.runner.outcome.payload import UnpicklableError
from tests.spark.model_support import expected, hundred_rows, net

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class ByBytes(nn.Module):
    """Returns an embedding for each text, the number of columns it was padded to, and the text's first letter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(256, 4, padding_idx=0)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        width = torch.full((len(ids),), ids.shape[1])
        each = self.table(ids)
        return {
            "width": width,
            "embedding": each.sum(1),
            "tokens": each,
            "first": [chr(row[0]) for row in ids.tolist()],
        }


def padded(texts: list[str]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    return {"ids": torch.tensor([list(text.encode().ljust(longest, b"\0")) for text in texts])}


def said(frame: DataFrame) -> str:
    """Return the message of the error that computing a DataFrame raises."""
    with pytest.raises(Exception, match=r"Error|EXCEPTION") as error:
        frame.collect()
    return str(error.value)


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    return hundred_rows(spark)


@pytest.fixture(scope="module")
def texts(spark: SparkSession) -> DataFrame:
    """Return 400 texts of 1 to 40 letters, in two partitions."""
    return spark.range(0, 400, 1, 2).selectExpr(
        "id", "repeat(char(97 + cast(id % 26 as int)), 1 + cast(hash(id) % 20 + 19 as int)) text"
    ).cache()  # fmt: skip


@pytest.mark.usefixtures("each_way")
def test_a_module_on_numbers(numbers: DataFrame) -> None:
    pair = numbers.withColumn("pair", F.array("a", F.col("b").cast("float")))
    model = net(3)
    wanted = expected(model, numbers)
    for column in ("features", "pair"):
        outputs = {"all": ArrayType(FloatType()), "first": "double"}
        both = nn.Sequential(model, First())
        found = spark_hvd.predict(pair, both, columns=column, outputs=outputs, batch_size=7)
        assert found.columns == [*pair.columns, "all", "first"]
        rows = found.orderBy("id").collect()
        np.testing.assert_allclose([row["all"] for row in rows], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose([row["first"] for row in rows], wanted[:, 0], rtol=1e-5, atol=1e-6)
    row = spark_hvd.predict(pair, model, columns=["pair"], outputs="vector").first()
    assert row is not None
    assert isinstance(row.prediction, DenseVector)


class First(nn.Module):
    def forward(self, all_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return all_of, all_of[:, :1]


@pytest.mark.usefixtures("each_way")
def test_a_loader_of_a_function_and_arguments_by_name(numbers: DataFrame) -> None:
    def load() -> Any:
        return lambda x, y: (x.numpy() + 2 * y.numpy(), [f"{value:.0f}" for value in x])

    outputs = {"sum": "float", "text": "string"}
    found = spark_hvd.predict(numbers, load, columns={"y": "b", "x": "whole"}, outputs=outputs).orderBy("id").collect()
    assert [(row["sum"], row["text"]) for row in found] == [(row.id * 2.0, str(row.id)) for row in found]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("window", [None, 64])
def test_texts_of_like_length_share_a_batch(texts: DataFrame, window: int | None) -> None:
    outputs = {"embedding": "array<float>", "width": "int", "first": "string", "tokens": "array<array<float>>"}
    found = spark_hvd.predict(
        texts, ByBytes(), columns="text", collate=padded, outputs=outputs, batch_size=16, window=window
    ).collect()
    assert [row.id for row in found] == list(range(400)), "the rows keep their order"
    table = ByBytes().table.weight.detach()
    for row in found[::7]:
        alone = table[torch.tensor(list(row.text.encode()))]
        np.testing.assert_allclose(row.embedding, alone.sum(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(row.tokens[: len(row.text)], alone, rtol=1e-6)
        assert row.first == row.text[0]
        assert len(row.tokens) == row.width
    padding = sum(row.width - len(row.text) for row in found) / sum(len(row.text) for row in found)
    assert padding < (0.15 if window is None else 0.4), f"{padding:.0%} of the text is added as padding"


def test_rows_of_mappings_as_pipelines_return_them(texts: DataFrame) -> None:
    def load() -> Any:
        return lambda values: [{"label": value[0], "score": len(value) / 40} for value in values]

    outputs = {"label": "string", "score": "double"}
    for row in spark_hvd.predict(texts, load, columns="text", collate=list, outputs=outputs).collect():
        assert (row.label, row.score) == (row.text[0], len(row.text) / 40)


def test_images_of_bytes_and_several_columns(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [(bytes([i] * 4), [float(i)] * (i % 3), i) for i in range(20)], "png binary, v array<float>, i int"
    )

    def collate(pngs: list[bytes], lists: list[list[float]], whole: list[int]) -> tuple[torch.Tensor, ...]:
        pixels = torch.tensor([list(png) for png in pngs], dtype=torch.float32)
        return pixels, torch.tensor([sum(each) for each in lists]), torch.tensor(whole)

    def load() -> Any:
        return lambda pixels, sums, whole: pixels.mean(1) + sums + whole

    columns = ["png", "v", "i"]
    found = spark_hvd.predict(frame, load, columns=columns, collate=collate, outputs="float", batch_size=8).collect()
    assert [row.prediction for row in found] == [2 * i + i * (i % 3) for i in range(20)]


def test_workers_share_the_pages_of_one_file_and_load_once(spark: SparkSession, tmp_path: Path) -> None:
    calls = str(tmp_path / "calls")

    def load() -> nn.Module:
        with open(calls, "a") as file:
            file.write(f"{os.getpid()}\n")
        return Mapped()

    frame = spark.range(0, 4000, 1, 8)
    for model in (load, Mapped()):
        outputs = {"pid": "int", "mapped": "boolean"}
        rows = spark_hvd.predict(frame, model, columns="id", outputs=outputs, batch_size=100).collect()
        assert all(row.mapped for row in rows), "the weights are in a file of the executor"
    assert len(Path(calls).read_text().split()) == 1, "the module is loaded once an executor"


class Mapped(nn.Module):
    """Returns whether its weights are in a mapped file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.weight.data_ptr()
        mapped = False
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(each, 16) for each in line.split()[0].split("-"))
            mapped |= low <= at < high and line.endswith("weights.safetensors")
        return torch.full((len(rows),), os.getpid()), torch.full((len(rows),), mapped)


def test_a_loader_of_what_cannot_be_pickled_is_called_once_a_worker(spark: SparkSession, tmp_path: Path) -> None:
    calls = str(tmp_path / "calls")

    def load() -> nn.Module:
        with open(calls, "a") as file:
            file.write(f"{os.getpid()}\n")
        module = nn.Linear(1, 1)
        module.lock = threading.Lock()  # type: ignore[assignment]
        return module

    frame = spark.range(0, 400, 1, 8).selectExpr("array(cast(id as float)) x")
    assert spark_hvd.predict(frame, load, columns="x", outputs="float").collect()
    pids = Path(calls).read_text().split()
    assert len(pids) == len(set(pids))


def test_empty_partitions(spark: SparkSession, texts: DataFrame) -> None:
    few = spark_hvd.predict(texts.where("id = 3").repartition(4), ByBytes(), columns="text", collate=padded,
                            outputs={"width": "int", "embedding": "vector"}, window=5)  # fmt: skip
    assert [row.width for row in few.collect()] == [len(row.text) for row in few.collect()]
    assert spark_hvd.predict(texts.where("id < 0"), ByBytes(), columns="text", collate=padded,
                             outputs={"width": "int"}).collect() == []  # fmt: skip


@pytest.mark.slow
def test_a_keras_model_and_a_loader_of_one(numbers: DataFrame) -> None:
    keras = pytest.importorskip("keras")
    backend = os.environ["KERAS_BACKEND"]

    def make() -> Any:
        os.environ["KERAS_BACKEND"] = backend
        import keras

        keras.utils.set_random_seed(0)
        a, b = keras.Input((1,), name="first"), keras.Input((1,), name="second")
        return keras.Model([a, b], keras.layers.Dense(2)(keras.layers.Concatenate()([a, b])))

    assert keras is not None
    frame = numbers.selectExpr("array(a) a", "array(cast(b as float)) b")
    columns = {"first": "a", "second": "b"}
    sent = spark_hvd.predict(frame, make(), columns=columns, outputs="array<float>").collect()
    made = spark_hvd.predict(frame, make, columns=["a", "b"], outputs="array<float>").collect()
    np.testing.assert_allclose([row.prediction for row in sent], [row.prediction for row in made], rtol=1e-5)


# ---- what it refuses before any job ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"outputs": {"id": "float"}}, DataError, r"already has a column 'id', which predict would append.*outputs="),
        ({"columns": "txt"}, DataError, r"columns names 'txt', which.*'text'"),
        ({"collate": None}, DataError, r"column 'text' is of type string.*pass collate="),
        ({"collate": None, "window": 9, "columns": "id"}, ValueError, r"window=9 without collate="),
        ({"batch_size": 0}, ValueError, r"batch_size=0: expected a whole number from 1"),
        ({"columns": []}, ValueError, r"columns=\[\]: expected names"),
        ({"outputs": {"x": "map<int,int>"}}, ValueError, r"'x' as 'map<int,int>': expected one of tinyint.*or vector"),
        ({"outputs": {}}, ValueError, r"outputs=\{\}: expected a type"),
        ({"outputs": {"x": 3}}, TypeError, r"'x': 3, expected a name and a Spark type"),
        ({"model_or_loader": 5}, TypeError, r"got 5 as its model: expected a torch.nn.Module"),
        ({"model_or_loader": lambda x: x}, TypeError, r"which takes x, as its model.*`lambda: function`"),
        ({"collate": threading.Lock().acquire}, UnpicklableError, r"cannot pickle collate.*model_or_loader"),
    ],
)  # fmt: skip
def test_arguments(texts: DataFrame, given: dict[str, Any], error: type[Exception], text: str) -> None:
    usual: dict[str, Any] = {"model_or_loader": ByBytes(), "columns": "text", "collate": padded, "outputs": "int"}
    with pytest.raises(error, match=re.compile(text, re.S)):
        spark_hvd.predict(texts, **{**usual, **given})


# ---- what workers find ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "outputs", "text"),
    [
        (lambda ids: ids.float(), "float", r"output 'prediction'.*float32 of shape \(\d+, \d+\).*declared as float: "
         r"expected the shape \(rows\).*declare it as 'array<float>'"),
        (lambda ids: ids[:3, 0], "int", r"output 'prediction' of the model has the shape \(3,\) for 32 rows"),
        (lambda ids: 1 / 0, "int", r"failed on a batch of 32 rows, called with \(ids=int64 \(32, \d+\)\): Zero"),
        (lambda ids: torch.empty(1 << 60), "int", r"32 rows does not fit into the memory.*smaller batch_size"),
        # By day tests/unit/test_outputs_of_models.py has what outputs may be.
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (
            (lambda ids: ids[:, 0], {"x": "int", "y": "int"}, r"returns one Tensor, but outputs declares 2: 'x', 'y'"),
            (lambda ids: {"u": ids, "v": ids}, {"x": "int"}, r"returns 'u', 'v', but outputs declares 'x'"),
            (lambda ids: ids[:, 0], "string", r"declared as string: expected a list of string"),
            (lambda ids: ["a"] * len(ids), "int", r"declared as int, but not all of its 32 values have this type"),
        )),
    ],
)  # fmt: skip
def test_outputs_that_were_not_declared(texts: DataFrame, function: Any, outputs: Any, text: str) -> None:
    frame = spark_hvd.predict(texts, lambda: function, columns="text", collate=padded, outputs=outputs, batch_size=32)
    message = said(frame)
    assert "ModelError" in message
    assert re.search(text, message, re.S), message


@pytest.mark.usefixtures("each_way")
def test_nulls(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        [("a", 1.0, [1.0]), (None, None, [2.0, 3.0])], "text string, x double, v array<float>"
    )
    text = said(spark_hvd.predict(frame, ByBytes(), columns="text", collate=padded, outputs={"width": "int"}))
    assert re.search(r"column 'text'( in predict)? has (1 null\(s\) in|nulls: fill or drop)", text)
    assert re.search(r"column 'x'( in predict)? has (1 null\(s\) in|nulls: fill or drop)",
                     said(spark_hvd.predict(frame, lambda: abs, columns="x", outputs="float")))  # fmt: skip
    text = said(spark_hvd.predict(frame.coalesce(1), lambda: abs, columns="v", outputs="float"))
    assert "lists of different lengths" in text
    for lists in ("array(x, 1D)", "array(array(1D, x))", "array(array(1D), IF(x IS NULL, NULL, array(x)))"):
        rows = frame.coalesce(1).selectExpr(f"{lists} AS v")
        text = said(spark_hvd.predict(rows, lambda: lambda v: v.flatten(1).sum(1), columns="v", outputs="float"))
        assert re.search(r"column 'v'.* has (1 null\(s\) in|nulls: fill or drop)", text), text


def test_a_loader_that_fails_or_loads_nothing(texts: DataFrame) -> None:
    def fails() -> Any:
        return open("/nowhere/weights.pt")

    def too_large() -> Any:
        return torch.empty(1 << 60)

    def nothing() -> Any:
        return None

    for load, wanted in (
        (fails, r"fails failed on \S+: FileNotFoundError.*called on executors: the files"),
        (too_large, r"too_large loads does not fit into the memory of this Python worker on \S+ \(\d+ MiB free.*"
                    r"spark.executor.memoryOverhead.*spark.task.cpus"),
        (nothing, r"nothing returned None: expected a torch.nn.Module, a keras.Model, or a function"),
    ):  # fmt: skip
        text = said(spark_hvd.predict(texts, load, columns="text", collate=padded, outputs="int"))
        assert re.search(wanted, text, re.S), text


OF_A_MODULE = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.sum(1)

def load():
    return Net()

def collate(values):
    return torch.tensor(values)
"""


def test_a_module_that_workers_lack_is_named(
    numbers: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_on_the_driver.py").write_text(OF_A_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("only_on_the_driver")

    def loads() -> Any:
        import only_on_the_driver

        return only_on_the_driver.Net()

    given: dict[str, dict[str, Any]] = {
        "load could not be unpickled": {"model_or_loader": own.load},
        "the model could not be unpickled": {"model_or_loader": own.Net()},
        "collate could not be unpickled": {"model_or_loader": torch.nn.Identity, "collate": own.collate},
        "loads failed": {"model_or_loader": loads},
    }
    for text, arguments in given.items():
        message = said(spark_hvd.predict(numbers, columns=["features"], outputs="float", **arguments))
        assert text in message
        assert "No module named 'only_on_the_driver'" in message
        assert "--py-files" in message


def test_a_collate_that_fails(texts: DataFrame) -> None:
    def broken(values: list[str]) -> Any:
        return {"a": 1}[values[0]]

    text = said(spark_hvd.predict(texts, ByBytes(), columns="text", collate=broken, outputs="int", batch_size=50))
    assert re.search(r"collate failed on 50 values of 'text': KeyError.*called with a list of values", text, re.S)
