"""Every exception of the core survives pickling, as launchers send them between processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

import spark_hvd.torch as hvd
from spark_hvd.elastic import run as elastic_run
from spark_hvd.world import errors


@pytest.mark.parametrize(
    "name", ["NotInitializedError", "CollectiveError", "MismatchError", "PlanMismatchError", "DuplicateNameError"]
)
def test_pickles(name: str) -> None:
    error = getattr(errors, name)("what, why, what next")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "what, why, what next"


def test_names_of_horovod() -> None:
    assert hvd.HorovodInternalError is hvd.CollectiveError
    assert issubclass(hvd.CollectiveError, RuntimeError)
    assert issubclass(hvd.NotInitializedError, ValueError)
    for mistake in (hvd.MismatchError, hvd.DuplicateNameError):
        assert issubclass(mistake, ValueError)
        assert issubclass(mistake, RuntimeError)
        assert not issubclass(mistake, hvd.CollectiveError)


def test_elastic_training_does_not_try_a_mistake_again() -> None:
    """Nor if the world ends at that moment, because another rank made the mistake before."""
    doomed: Any = SimpleNamespace(world_failure="rank 1 has ended")
    for mistake in (hvd.MismatchError("shapes"), hvd.PlanMismatchError("shapes"), hvd.DuplicateNameError("loss")):
        assert not elastic_run._is_fault_of_the_world(mistake, doomed)
    assert elastic_run._is_fault_of_the_world(RuntimeError("Connection reset by peer"), doomed)


def test_names_of_the_face_are_there_once() -> None:
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
