"""The data sets that a rank was handed with its order, by the names that ``data=`` gave them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_hvd.world.words import nearest

_handed: dict[str, bytes] = {}


@dataclass(frozen=True)
class PathSource:
    """Files that ranks read themselves.

    Attributes:
        url: Where; a path or a URL.
    """

    url: str


def hand(sources: Mapping[str, bytes]) -> None:
    """Keep the sources of this rank's data sets, by name; pickled, as few ranks read all of them."""
    _handed.clear()
    _handed.update(sources)


def source_of(name: str) -> Any:
    """What tells where the rows of a data set are: a :class:`~spark_hvd.data.spool.SpoolSource` or `PathSource`.

    Raises:
        KeyError: there is none of that name; names those that there are.
    """
    if name in _handed:
        return pickle.loads(_handed[name])
    there = f"This run has {', '.join(map(repr, _handed))}." if _handed else "This run was given none."
    raise KeyError(
        f"no data set {name!r}. {there}{nearest(name, _handed)} Data sets are named where ranks are started: "
        f"spark_hvd.run(fn, data={{{name!r}: df}})"
    )
