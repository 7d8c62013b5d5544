"""Every exception of the core survives pickling, as launchers carry them between processes."""

from __future__ import annotations

import pickle

import pytest

import spark_hvd.torch as hvd
from spark_hvd import errors


@pytest.mark.parametrize("name", ["NotInitializedError", "CollectiveError", "MismatchError", "PlanMismatchError"])
def test_pickles(name: str) -> None:
    error = getattr(errors, name)("what, why, what next")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "what, why, what next"


def test_names_of_horovod() -> None:
    assert hvd.HorovodInternalError is hvd.CollectiveError
    assert issubclass(hvd.CollectiveError, RuntimeError)
    assert issubclass(hvd.NotInitializedError, ValueError)


def test_face_is_sorted_and_complete() -> None:
    assert hvd.__all__ == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
