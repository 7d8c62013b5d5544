"""A data set's Unischema as our columns and decoders: its codecs decode, and the values are checked as any others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import ReaderSpec
from spark_hvd.estimators.petastorm.bridge import install
from spark_hvd.estimators.petastorm.parquet import ParquetDataset
from spark_hvd.store import Store


def load_unischema(store: Store, url: str) -> Any:
    """The Unischema of the data set at ``url``.

    It is a pickle, which Petastorm restricts to its own classes and those of numpy, pyspark and the standard library:
    read data sets of people you trust.

    Raises:
        DataError: the data set has none, or one that cannot be read.
        EstimatorError: Petastorm is missing or does not fit.
    """
    install()
    from petastorm.etl.dataset_metadata import get_schema

    try:
        return get_schema(ParquetDataset(store.inner_path(url), filesystem=store.filesystem))
    except Exception as error:  # Petastorm's own, those of pickle, those of the file system
        raise DataError(f"cannot read the Unischema of {url}: {type(error).__name__}: {error}") from error


def columns_of_unischema(schema: Any) -> tuple[Column, ...]:
    """What the tensors of each field are: float64 and decimals become float32, as for all data that we did not write.

    Strings, dates and the like get the dtype "object".
    """
    return tuple(Column(field.name, _dtype(field.numpy_dtype), _shape(field.shape)) for field in schema.fields.values())


def decoders_of_unischema(schema: Any) -> dict[str, Callable[[bytes], Any]]:
    """Field name -> what its codec makes of the bytes of a value, for the fields that lie as bytes in the files."""
    from petastorm.codecs import ScalarCodec

    return {
        field.name: partial(field.codec.decode, field)
        for field in schema.fields.values()
        if field.codec is not None and not isinstance(field.codec, ScalarCodec)
    }


def decoded_spec(spec: ReaderSpec) -> ReaderSpec:
    """``spec`` with the columns and decoders of the data set's Unischema; as it is where the data set has none.

    Raises:
        DataError: the Unischema cannot be read, or lacks a column that ``spec`` asks for.
    """
    if not spec.dataset.unischema:
        return spec
    schema = load_unischema(spec.store, spec.dataset.url)
    dataset = replace(spec.dataset, columns=columns_of_unischema(schema))
    wanted = set(spec.columns)
    decoders = {name: decode for name, decode in decoders_of_unischema(schema).items() if name in wanted}
    return replace(spec, dataset=dataset, decoders={**decoders, **spec.decoders})


def _dtype(numpy_dtype: Any) -> str:
    dtype = np.dtype("float32" if numpy_dtype in (Decimal, np.float64) else numpy_dtype)
    return dtype.name if dtype.kind in "biuf" else "object"


def _shape(shape: tuple[int | None, ...]) -> tuple[int, ...] | None:
    known = tuple(size for size in shape if size is not None)
    return known if len(known) == len(shape) else None
