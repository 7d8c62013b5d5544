"""Numbers for what all ranks make in the same order, so that what belongs together has the same number everywhere."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from spark_hvd.context import init as context
from spark_hvd.world import launcher as elastic_launcher

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def ordinal(kind: str) -> str:
    """The next number of a kind.

    A rank that an elastic world has taken in has not made what the others made in the worlds before: what is made
    inside such a world is numbered from 0.
    """
    if elastic_launcher.installed() is None or not context.in_world():
        return str(next(_numbers[kind]))
    here = context.current()
    return f"{here.world.generation}.{next(here.ordinals[kind])}"
