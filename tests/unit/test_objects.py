"""Which part of an object is in the hashed pickle, and which part follows it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from spark_hvd.collectives import objects
from spark_hvd.world.errors import CollectiveError

NUMBERS = np.arange(20_000, dtype=np.int64)


@pytest.mark.parametrize("array", [NUMBERS, NUMBERS.astype(np.float32), np.asfortranarray(NUMBERS.reshape(2, -1))])
def test_large_arrays_of_numbers_follow(array: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    payload, seal, _ = objects._pickled({"it": array})
    _, pickled, followed = seal.split(" ")
    assert int(pickled) < 1000
    assert int(followed) == array.nbytes
    assert payload.numel() % objects._ALIGNMENT == 0


@pytest.mark.parametrize(
    "value",
    [
        np.frombuffer(pickle.dumps(list(range(50_000))), dtype=np.uint8),  # a receiver may unpickle them
        np.zeros(100_000, dtype="S4"),
        np.zeros(100_000, dtype="V4"),
        NUMBERS.astype(object),
        NUMBERS[:1000],
        bytearray(100_000),
        torch.zeros(100_000),
        pickle.PickleBuffer(bytes(100_000)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_else_is_hashed(value: object) -> None:
    _, seal, failure = objects._pickled([value, NUMBERS[:5]])
    assert failure is None
    assert len(seal.split(" ")) == 2


@pytest.mark.parametrize(("size", "travels"), [(900, False), (1100, True)])
def test_a_small_pickle_is_its_own_seal(size: int, travels: bool) -> None:
    payload, seal, _ = objects._pickled({"it": "x" * size})
    assert bool(payload.numel()) is travels
    assert payload.numel() == objects._numel(seal)
    assert objects._loaded(payload, seal, "what came") == {"it": "x" * size}


@pytest.mark.parametrize("at", [0, 10, 50])
def test_a_changed_pickle_is_refused_and_its_arrays_are_not_looked_at(at: int) -> None:
    payload, seal, _ = objects._pickled({"it": NUMBERS})
    payload[at] ^= 1
    with pytest.raises(CollectiveError, match="not unpickled"):
        objects._loaded(payload, seal, "rank 0 got a pickle from rank 1")
