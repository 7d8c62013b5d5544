"""Sharded saves with wait=False: the same as for one file, with collectives alongside those of training."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.store.errors import StoreError
from tests.background_saves import break_it, raised
from tests.ranks import Ranks, ranks
from tests.stores import gated

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as world:
        yield world


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (hvd.size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()


def full(model: nn.Module) -> list[Any]:
    values: list[Any] = list(model.state_dict().values())
    return [value.full_tensor().tolist() for value in values]


def load_sharded(where: Any) -> tuple[int, Any, list[Any]]:
    model, optimizer = sharded()
    found = hvd.checkpoint.load_sharded(where, model, optimizer)
    assert found is not None
    loaded = full(model)
    step_of(model, optimizer)
    return found.step, found.state, [loaded, full(model)]


def test_a_sharded_one_is_of_its_moment_and_exchanges_beside_training(two: Ranks, tmp_path: Path) -> None:
    def fn() -> tuple[Any, Any]:
        model, optimizer = sharded()
        step_of(model, optimizer)
        handle = hvd.checkpoint.save_sharded(gated(tmp_path), model, optimizer, {"epoch": 1}, step=1, wait=False)
        then = [full(model)]
        for number in range(5):  # collectives without names are matched by their order
            step_of(model, optimizer)
            then.append(full(model))
            assert hvd.allreduce(torch.ones(1)).item() == 1.0
            assert hvd.allgather_object(hvd.rank()) == [0, 1]
            if number == 2 and hvd.rank() == 0:
                assert not handle.done()
                (tmp_path / "open").touch()
        hvd.checkpoint.save_sharded(gated(tmp_path), model, optimizer, {"epoch": 6}, step=6, keep=1, wait=False).wait()
        assert sorted(os.listdir(tmp_path / "run"))[1:] == ["step-000000000006.sharded.json"]
        step_of(model, optimizer)
        return load_sharded(tmp_path / "run"), [then[-1], full(model)]

    for found, expected in two.run(fn):
        assert found == (6, {"epoch": 6}, expected)


def test_a_sharded_one_that_fails_is_told_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    def fn() -> list[str]:
        model, optimizer = sharded()
        handle = hvd.checkpoint.save_sharded(gated(tmp_path), model, optimizer, step=1, wait=False)
        hvd.barrier()
        if hvd.rank() == 0:
            break_it(tmp_path / "run")
            (tmp_path / "open").touch()
        return [
            raised(lambda: hvd.checkpoint.save_sharded(tmp_path / "run", model, optimizer, step=2)),
            raised(handle.wait),
        ]

    (tmp_path / "run").mkdir()
    for told, again in two.run(fn):
        assert told.startswith(
            f"saving gated://{tmp_path}/run/step-000000000001.sharded.json in the background failed: "
        )
        assert again == told


def test_a_sharded_one_ends_with_a_peer(tmp_path: Path) -> None:
    def fn() -> list[str]:
        model, optimizer = sharded()
        hvd.checkpoint.save_sharded(gated(tmp_path), model, optimizer, step=1, wait=False)
        hvd.barrier()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "open").touch()
        texts = []
        for _ in range(2):
            try:
                hvd.checkpoint.latest(tmp_path / "run")
            except StoreError as error:
                texts.append(str(error))
        return texts

    with ranks(2) as world:
        (ok, texts), _ = world.outcomes(fn)
    assert ok, texts
    (text,) = texts
    assert "in the background failed: " in text
    assert hvd.checkpoint.latest(tmp_path / "run") is None
