"""A rank dies in the middle of a step, in any way: those that wait for it in shared memory notice."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.transport.host import shared_memory
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def leave(folder: Path) -> None:
    hvd.shutdown()


def end(folder: Path) -> None:
    os._exit(3)


def end_beside_a_child(folder: Path) -> None:
    """The child, for example a data loader's worker, has copies of all descriptors and survives."""
    child = os.fork()
    if child == 0:
        time.sleep(30)
        (folder / "child").unlink()
        os._exit(0)
    (folder / "child").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("small", [shared_memory.SMALL, 0], ids=["copies", "shares"])
@pytest.mark.parametrize("go", [leave, end, end_beside_a_child], ids=lambda go: go.__name__)
@pytest.mark.slow
def test_a_rank_that_goes(go: Any, small: int, tmp_path: Path) -> None:
    def fn() -> str:
        shared_memory.SMALL = small
        model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), bucket_cap_mb=0.001
        )
        try:
            for step in range(4):
                if step == 2 and hvd.rank() == 2:
                    # Its second bucket is not filled.
                    model[0].weight.register_hook(lambda _: (time.sleep(0.2), go(tmp_path))[0])
                model(torch.ones(2, 30)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except hvd.CollectiveError as error:
            if go is end_beside_a_child and hvd.rank() == 0:
                os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it is still alive
            return str(error)
        return "no error"

    with ranks(3) as world:
        outcomes = world.outcomes(fn)
    for ok, text in outcomes[:2]:
        assert ok
        assert text.startswith("reducing gradients failed because a peer or the network did: the connection to rank 2")
    assert outcomes[2] != (True, "no error")
