"""The registry of the data sets that a rank has received, by their names in ``data=``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_hvd.world.words import nearest

if TYPE_CHECKING:
    from spark_hvd.data.shard import DatasetShard

_sources: dict[str, bytes] = {}


def register(sources: Mapping[str, bytes]) -> None:
    """Register the pickled sources of this rank's data sets, by name, instead of earlier ones.

    They stay pickled until they are read, as few ranks read all of them.
    """
    _sources.clear()
    _sources.update(sources)


def source_of(name: str) -> Any:
    """Return the source of a data set: a :class:`~spark_hvd.data.spool.SpoolSource` or a ``DataSource``.

    Raises:
        DataError: There is no data set of this name. The message lists those that exist.
    """
    if name in _sources:
        return pickle.loads(_sources[name])
    from spark_hvd.data.readers.errors import DataError

    known = f"this run has {', '.join(map(repr, _sources))}" if _sources else "this run was given none"
    raise DataError(
        f"no data set {name!r}: {known}.{nearest(name, _sources)} Data sets are named where ranks are started: "
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
