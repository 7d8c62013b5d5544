"""Strangers on the network: what they put in place of a pickle between ranks is not unpickled."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd import context, objects
from spark_hvd.kv import TCPStore
from spark_hvd.layout import WorldLayout
from spark_hvd.world import Endpoint, World
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MARK = "0123456789abcdef" * 32


def join_with_secret() -> None:
    """A world as a launcher makes it, with a secret that no stranger has."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    kv = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    me = WorldLayout.from_hosts(["127.0.0.1"] * size).of_process(rank)
    context.join(World(me, Endpoint("127.0.0.1", port), secret=b"s" * 32), kv, timeout=60)


@pytest.fixture(scope="module")
def sealed() -> Any:
    with ranks(2, join=False) as world:
        world.run(join_with_secret)
        yield world


class Runs:
    """A pickle that, if it is loaded, leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def swapped(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on this rank's pickles are changed on their way, after they were sealed."""
    broadcast, allgather = objects.start_broadcast, objects.start_allgather

    def changed(start: Any) -> Any:
        def starting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return start(
                [change(tensors[0])] if tensors[0].dtype == torch.uint8 and tensors[0].numel() else tensors,
                *args,
                **kwargs,
            )

        return starting

    objects.start_broadcast, objects.start_allgather = changed(broadcast), changed(allgather)


EVERY = ("another", "bit", "cut", "earlier")


@pytest.mark.parametrize("what", EVERY)
def test_what_was_changed_on_its_way_is_not_unpickled(sealed: Ranks, tmp_path: Path, what: str) -> None:
    proof = tmp_path / "proof"

    def fn() -> list[str]:
        earlier: list[torch.Tensor] = []

        def change(true: torch.Tensor) -> torch.Tensor:
            data = bytearray(true.numpy().tobytes())
            if what == "another":
                evil = pickle.dumps(Runs(proof))
                data[: len(evil)] = evil
            elif what == "bit":
                data[len(data) // 2] ^= 1
            elif what == "cut":
                data[-100:] = bytes(100)
            elif earlier:  # the recording of a call of the same name and length
                return earlier[0]
            else:
                earlier.append(true.clone())
            return torch.frombuffer(data, dtype=torch.uint8)

        saved = objects.start_broadcast, objects.start_allgather
        found = []
        try:
            if hvd.rank() == 1:
                swapped(change)
            for call in (
                lambda number: hvd.broadcast_object(MARK + number if hvd.rank() else None, 1, "named"),
                lambda number: hvd.allgather_object(MARK + number, "gathered")[1],
            ):
                earlier.clear()
                for number in "12":
                    try:
                        assert call(number) == MARK + number
                    except hvd.CollectiveError as error:
                        found.append(str(error))
        finally:
            objects.start_broadcast, objects.start_allgather = saved
        return found

    zero, _ = sealed.run(fn)
    assert len(zero) == (2 if what == "earlier" else 4)
    assert all("rank 0 got a pickle from rank 1" in text and "not unpickled" in text for text in zero)
    assert not proof.exists()
    assert sealed.run(lambda: hvd.allgather_object(hvd.rank())) == [[0, 1]] * 2
