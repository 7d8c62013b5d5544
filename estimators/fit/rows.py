"""Rows that go directly from a DataFrame's partitions to the ranks of a fit, which keep them on their disks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from spark_hvd.data.readers.dataset import Column, DatasetMeta
from spark_hvd.estimators.data.columns import expression_of
from spark_hvd.estimators.data.materialize import check_validation
from spark_hvd.estimators.fit.backend import SparkBackend
from spark_hvd.estimators.fit.plan import FitPlan
from spark_hvd.runner.spark.input import Split
from spark_hvd.runner.spark.series import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class RowsForRanks:
    """What a fit passes to its run.

    ``train`` and ``validation`` describe the columns; only ranks know the number of rows.
    """

    data: Mapping[str, Any]
    train: DatasetMeta
    validation: DatasetMeta | None


def passes_rows_directly(plan: FitPlan) -> bool:
    """Return whether ranks get rows directly: the fit has no store, and nothing reads files again or elsewhere."""
    settings = plan.settings
    return (
        settings["store"] is None
        and not plan.spec.elastic
        and isinstance(plan.backend, SparkBackend)
        and settings["reader"] in (None, "arrow")
        and not settings["inmemory_cache_all"]
        and not plan.spec.validation_in_background
    )


def rows_for_ranks(df: DataFrame, columns: Sequence[Column], validation: float | str | None, seed: int) -> RowsForRanks:
    """Return the rows of a DataFrame, computed once for training and validation.

    Raises:
        ValueError, DataError: ``validation`` is invalid.
    """
    check_validation(df, validation)
    names = [column.name for column in columns]
    sources = [expression_of(column) for column in columns]
    if validation is None:
        return RowsForRanks({"training": df.select(sources)}, DatasetMeta("the DataFrame", tuple(columns), ()), None)
    if isinstance(validation, str):
        marked = F.col(quoted(validation)).cast("bigint") > 0
        held_out = F.coalesce(marked, F.lit(False))
        # Ranks count its nulls, as they count those of the model's columns.
        name = f"{validation} (validation)" if validation in names else validation
        columns, names = [*columns, Column(name, "bool")], [*names, name]
        sources.append(marked.alias(name))
    else:
        held_out = F.rand(seed) < validation
    meta = DatasetMeta("the DataFrame", tuple(columns), ())
    mark = "__held" + "_" * max(map(len, names))  # longer than all column names
    split = Split(df.select([*sources, held_out.alias(mark)]), names, "validation", F.col(mark))
    return RowsForRanks({"training": split}, meta, meta)
