"""What processes an elastic rank starts, and which signals it gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cloudpickle
import pytest

from spark_hvd.runner import run_elastic_local
from spark_hvd.testing import FaultPlan

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("no_leaks")


def ends_a_child() -> tuple[int | None, int]:
    import multiprocessing
    import time

    import spark_hvd.torch as hvd

    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
    child.start()

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        child.terminate()
        child.join(10)
        for _ in range(5):
            time.sleep(0.2)
            state.commit()

    train(hvd.elastic.ObjectState(step=0))
    return child.exitcode, hvd.generation()


def test_a_signal_to_a_child_is_no_notice_to_the_rank() -> None:
    assert run_elastic_local(ends_a_child, num_proc=2, min_num_proc=1) == [(-15, 0), (-15, 0)]


def loads_data() -> tuple[int, int]:
    import torch

    import spark_hvd.torch as hvd

    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < 2:
            for batch, (values,) in enumerate(loader):
                state.total += int(hvd.allreduce(values.sum(), op=hvd.Sum))
                sampler.record_batch(batch, len(values))
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    state = hvd.elastic.TorchState(sampler=sampler, epoch=0, total=0)
    train(state)
    return state.total, hvd.generation()


def test_loaders_with_processes_of_their_own() -> None:
    total = 2 * sum(range(64))
    assert run_elastic_local(loads_data, num_proc=2) == [(total, 0), (total, 0)]


def is_killed(faults: FaultPlan) -> int:
    import torch

    import spark_hvd.torch as hvd

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        while state.step < 20:
            faults.at(state.step)
            hvd.allreduce(torch.ones(1), name="step")
            state.step += 1
            state.commit()

    train(hvd.elastic.ObjectState(step=0))
    return hvd.generation()


def test_each_generation_has_a_timeline(tmp_path: Path) -> None:
    env = {"HOROVOD_TIMELINE": str(tmp_path / "trace.json")}
    faults = FaultPlan().kill(rank=1, step=5)
    last = run_elastic_local(is_killed, [faults], num_proc=2, env=env)[0]
    assert last == 1
    for name in ("trace.json", "trace.1.json"):
        events = json.loads((tmp_path / name).read_text())
        assert "step" in json.dumps(events), name
