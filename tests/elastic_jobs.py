"""A training job for tests of elastic runs. It returns the history of the state that it ends with.

The history is part of the state: the samples that were trained on, and the worlds. So it shows how the final weights
were computed, whatever was lost on the way.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import rank_info
from spark_hvd.testing import FaultPlan
from spark_hvd.world.launcher import installed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests

SAMPLES = 48


@dataclass(frozen=True)
class Job:
    """The training to run.

    Attributes:
        faults: Called at each step. Steps are counted from 0 over all epochs.
        epochs: Number of epochs, each over :data:`SAMPLES` samples.
        batch: Number of samples in a batch of each rank.
        pause: Minimum seconds of a step.
        every: Number of steps between commits.
        log: File to which each rank adds a :class:`Line` after each commit.
        until: After the epochs, training continues until this file exists; None to stop.
        stay: A generation, and the step before which it waits until its members change.
        late: A number of processes, and a size of the world. Further processes wait until a world of this size, which
            they will enlarge, has made a step.
    """

    faults: FaultPlan = field(default_factory=FaultPlan)
    epochs: int = 2
    batch: int = 4
    pause: float = 0.0
    every: int = 1
    log: str | None = None
    until: str | None = None
    stay: tuple[int, int] | None = None
    late: tuple[int, int] | None = None


@dataclass(frozen=True)
class Result:
    """What a rank ended with.

    Attributes:
        rank: The rank.
        size: Size of the last world.
        generation: The last generation.
        commits: Number of commits of the state.
        weights: Weights of the model.
        seen: The samples of each step in the state's history, of all ranks together.
        worlds: The generation and size of the world in each step.
        started: The generation in which this process began to train.
        host: The host, as Spark knows it.
        local: The local rank, and the number of ranks on its host.
    """

    rank: int
    size: int
    generation: int
    commits: int
    weights: list[float]
    seen: list[list[int]]
    worlds: list[tuple[int, int]]
    started: int
    host: str
    local: tuple[int, int]

    @property
    def sizes(self) -> list[int]:
        """The sizes of the worlds, in order."""
        return [size for size, _ in itertools.groupby(size for _, size in self.worlds)]


def checked(results: list[Result], every: int = 1) -> Result:
    """Check what must hold in any case, and return rank 0's result.

    All ranks of the last world have the same state, bit for bit, and each epoch has seen each sample once. Only with
    more than two ranks, some are seen twice at the end of an epoch whose samples cannot be divided equally.
    """
    first = results[0]
    assert [result.rank for result in results] == list(range(len(results)))
    for result in results:
        assert (result.size, result.generation) == (len(results), first.generation)
        assert (result.commits, result.weights) == (first.commits, first.weights)
        assert (result.seen, result.worlds) == (first.seen, first.worlds)
    counts = Counter(sample for step in first.seen for sample in step)
    epochs = min(counts.values())
    extra = sum(counts.values()) - epochs * SAMPLES
    most = max(size for _, size in first.worlds)
    assert set(counts) == set(range(SAMPLES))
    assert extra == 0 if most <= 2 else extra < epochs * most
    assert first.commits == len(first.seen) // every
    return first


def train(job: Job) -> Result:
    """Fit a small model by SGD with momentum. The samples are shared among the current ranks."""
    hvd.init()
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(6, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=3)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, seen=[], worlds=[])
    started = None

    @hvd.elastic.run
    def fit(state: Any) -> None:
        nonlocal started
        started = hvd.generation() if started is None else started
        while state.epoch < job.epochs or (job.until is not None and not together(job.until)):
            sampler.set_epoch(state.epoch)
            for batch in batches(list(sampler), job.batch):
                job.faults.at(state.step)
                if (hvd.generation(), state.step) == job.stay:
                    await_update()
                time.sleep(job.pause)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
                optimizer.step()
                everyones = hvd.allgather(torch.tensor(batch))
                sampler.record_batch(0, len(batch))
                state.step += 1
                state.seen = [*state.seen, everyones.tolist()]
                state.worlds = [*state.worlds, (hvd.generation(), hvd.size())]
                if state.step % job.every == 0:
                    state.commit()
                    note(job.log, state.step)
            state.epoch += 1

    come_late(job)
    fit(state)
    weights = torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()
    assert started is not None
    return Result(
        hvd.rank(),
        hvd.size(),
        hvd.generation(),
        state.commits,
        weights,
        state.seen,
        state.worlds,
        started,
        rank_info().host,
        (hvd.local_rank(), hvd.local_size()),
    )


def batches(indices: list[int], size: int) -> Iterator[list[int]]:
    """Return lists of ``size`` indices. The last one may be shorter."""
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def come_late(job: Job) -> None:
    """Wait until the world exists that this process will enlarge, unless it is one of the first processes."""
    if job.late is None:
        return
    assert job.log is not None
    first, size = job.late
    come = Path(job.log + ".come")
    with come.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if come.read_text().split().index(str(os.getpid())) >= first:
        while not any(line.size == size for line in read(Path(job.log))):
            time.sleep(0.01)


def await_update() -> None:
    """Wait until the members of this rank's world are about to change, which happens at the next commit."""
    launcher = installed()
    assert launcher is not None
    while not launcher.update_wanted:
        time.sleep(0.01)


def together(path: str) -> bool:
    """Return whether a file exists, the same on all ranks."""
    return bool(hvd.broadcast_object(Path(path).exists(), root_rank=0))


def note(log: str | None, step: int) -> None:
    """Append a line to the log in a single write."""
    if log is not None:
        with open(log, "a") as file:
            file.write(
                f"{time.time()} {os.getpid()} {hvd.generation()} {hvd.rank()} {hvd.size()} {step} {rank_info().host}\n"
            )


@dataclass(frozen=True)
class Line:
    """What a rank recorded after a commit."""

    time: float
    process: int
    generation: int
    rank: int
    size: int
    step: int
    host: str


def read(log: Path) -> list[Line]:
    """Return the lines of a log."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Line(float(line[0]), *map(int, line[1:-1]), line[-1]) for line in lines]  # type: ignore[call-arg, arg-type]
