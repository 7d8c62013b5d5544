"""The data sets that a rank was handed with its order, by the names that ``data=`` gave them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_hvd.world.words import nearest

if TYPE_CHECKING:
    from spark_hvd.data.shard import DatasetShard

_handed: dict[str, bytes] = {}


def hand(sources: Mapping[str, bytes]) -> None:
    """Keep the sources of this rank's data sets, by name; pickled, as few ranks read all of them."""
    _handed.clear()
    _handed.update(sources)


def source_of(name: str) -> Any:
    """Return where the rows of a data set are: a :class:`~spark_hvd.data.spool.SpoolSource` or a ``DataSource``.

    Raises:
        DataError: There is none of that name; names those that there are.
    """
    if name in _handed:
        return pickle.loads(_handed[name])
    from spark_hvd.data.readers.errors import DataError

    there = f"this run has {', '.join(map(repr, _handed))}" if _handed else "this run was given none"
    raise DataError(
        f"no data set {name!r}: {there}.{nearest(name, _handed)} Data sets are named where ranks are started: "
        f"spark_hvd.run(fn, data={{{name!r}: df}})"
    )


def get_dataset_shard(name: str = "train") -> DatasetShard:
    """Return this rank's part of a data set that was passed to ``run`` as ``data={name: ...}``. Collective.

    Returns once the rows of a DataFrame have arrived.

    Raises:
        DataError: There is no data set of this name, or its rows do not arrive.
    """
    source = source_of(name)
    from spark_hvd.data.shard import DatasetShard, source_here  # only now: pyarrow takes a rank without data 0.1 s

    return DatasetShard(name, source_here(name, source))
