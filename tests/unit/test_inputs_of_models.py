"""What a model takes from columns: as in training, or as specified later."""

from __future__ import annotations

import pytest
import torch
from pyspark.sql import types as T  # noqa: N812

from spark_hvd.data.readers.dataset import Column
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.transform.meta import inputs_as_trained

SCHEMA = T.StructType([T.StructField("ids", T.DoubleType()), T.StructField("pixels", T.ArrayType(T.FloatType()))])
TRAINED = (
    TensorSpec(Column("ids", "float32", (), "double")),
    TensorSpec(Column("pixels", "float32", (4,), "array<float>"), "float32", (-1, 4)),
)


def test_shapes_and_dtypes_that_are_set_after_the_fit_count() -> None:
    names = ["ids", "pixels"]
    assert inputs_as_trained(SCHEMA, names, {}, TRAINED) == TRAINED
    ids, pixels = inputs_as_trained(SCHEMA, names, {}, TRAINED, [None, (-1, 2, 2)], ["int64", None])
    assert (ids.column.dtype, ids.dtype) == ("float64", "int64")  # otherwise large ids would change
    assert ids.of(torch.tensor([16_777_217.0], dtype=torch.float64)).tolist() == [16_777_217]
    assert pixels.dtype == "float32"
    assert pixels.of(torch.zeros(3, 4)).shape == (3, 2, 2)
    with pytest.raises(ValueError, match=r"input_dtypes=\['int64'\]: expected 2, one for each of 'ids', 'pixels'"):
        inputs_as_trained(SCHEMA, names, {}, TRAINED, None, ["int64"])
