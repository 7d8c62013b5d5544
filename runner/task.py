"""What runs in each Spark task of a run: finds its rank, meets the others, supervises the rank's process."""

from __future__ import annotations

import base64
import os
import pickle
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from spark_hvd.layout import RankInfo, WorldLayout
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.gpus import GpuError, GpuShare, devices_of
from spark_hvd.runner.hub import Hub, HubAddress, Link
from spark_hvd.runner.hub_state import HubState
from spark_hvd.runner.network import interface_of
from spark_hvd.runner.outcome import Packed, to_rows
from spark_hvd.runner.processes import apply_env, fork_server
from spark_hvd.runner.supervise import RankJob, not_started, supervise

if TYPE_CHECKING:
    import pyarrow
    from pyspark import BarrierTaskContext

_CONNECT_WAIT = 8.0
"""Seconds to reach the driver's hub; less than the hub's own patience with missing tasks (FALLBACK_AFTER)."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What the driver tells every task of a run.

    Attributes:
        run_id: Unique name of the run.
        hub: The driver's hub; None where executors cannot know the driver (Spark Connect).
        env: Changes to the environment of the ranks; None unsets a variable.
        backend: "gloo", "nccl" or None for both.
        start_timeout: Seconds for ranks to come up and meet.
        collective_timeout: Seconds after which a collective that peers do not join fails.
        timeout: Seconds that ranks may run, or None.
        secret: The world's, from which the keys between ranks are derived. It travels in Spark's closure only.
        spool: A directory of the driver's for large values, where all tasks run on the driver's machine.
        cpus_per_proc: Cores of a rank, if the run was asked for a number.
        gpus_per_proc: GPUs of a rank, if the run was asked for a number.
        may_share_gpus: Whether several ranks are meant to use one GPU.
    """

    run_id: str
    hub: HubAddress | None = field(repr=False)
    env: Mapping[str, str | None] = field(repr=False)
    backend: str | None
    start_timeout: float
    collective_timeout: float
    timeout: float | None
    secret: bytes = field(repr=False)
    spool: str | None = None
    cpus_per_proc: int | None = None
    gpus_per_proc: int | None = None
    may_share_gpus: bool = False

    @classmethod
    def of(
        cls,
        config: RunConfig,
        run_id: str,
        hub: HubAddress | None,
        spool: str | None = None,
        *,
        may_share_gpus: bool = False,
    ) -> TaskSpec:
        """What tasks need of a run's arguments."""
        return cls(
            run_id=run_id,
            hub=hub,
            env=config.env,
            backend=config.backend,
            start_timeout=config.start_timeout,
            collective_timeout=config.collective_timeout,
            timeout=config.timeout,
            secret=secrets.token_bytes(32),
            spool=spool,
            cpus_per_proc=config.cpus_per_proc,
            gpus_per_proc=config.gpus_per_proc,
            may_share_gpus=may_share_gpus,
        )

    def job(self, me: RankInfo, store_host: str, payload: bytes, gpus: Sequence[str] | None) -> RankJob:
        """What the supervisor of one rank is to run."""
        return RankJob(
            me=me,
            store_host=store_host,
            payload=payload,
            env=rank_env(self, me, store_host, gpus),
            backend=self.backend,
            # A CUDA_VISIBLE_DEVICES of the user's own is the same for all ranks, who divide it by their local rank.
            gpus=GpuShare(
                None if "CUDA_VISIBLE_DEVICES" in self.env else gpus, self.gpus_per_proc, self.may_share_gpus
            ),
            start_timeout=self.start_timeout,
            collective_timeout=self.collective_timeout,
            timeout=self.timeout,
            secret=self.secret,
        )


def run_task(spec: TaskSpec, payload: bytes) -> Iterator[pyarrow.RecordBatch]:
    """Run this task's rank and yield its outcome as record batches of the result schema."""
    import pyarrow
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    assert isinstance(context, BarrierTaskContext)
    packed = _run_rank(spec, payload, context)
    for rank, ok, part, chunk in to_rows(packed, spec.spool):
        yield pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.array([rank], pyarrow.int32()),
                pyarrow.array([ok]),
                pyarrow.array([part], pyarrow.int32()),
                pyarrow.array([chunk], pyarrow.binary()),
            ],
            names=["rank", "ok", "part", "chunk"],
        )


def _run_rank(spec: TaskSpec, payload: bytes, context: BarrierTaskContext) -> Packed:
    # Every task sees the same list in the same order, so all compute the same ranks without a message.
    layout = WorldLayout.from_hosts([host_of(info.address) for info in context.getTaskInfos()])
    me = layout.of_process(context.partitionId())
    gpus = context.resources().get("gpu")
    addresses = None if gpus is None else gpus.addresses
    server = fork_server(spec.env, _executor_pid())  # starts to import torch while we meet the others
    with ExitStack() as closing:
        link = None if spec.hub is None else meet(Link(spec.hub, me.rank), context.taskAttemptId(), spec.start_timeout)
        on_lines = None
        if link is None:
            on_lines = _print_here
            link = _meet_at_rank_0(spec, me, layout, context, closing)
        closing.callback(link.close)
        try:
            mine = devices_of(addresses, 1, 0, os.environ.get("CUDA_VISIBLE_DEVICES"), spec.gpus_per_proc)
        except GpuError as error:
            return not_started(me, link, str(error))
        return supervise(spec.job(me, layout.ranks[0].host, payload, mine), link, server, on_lines)


def _executor_pid() -> int:
    """The executor's JVM, above Spark's daemon, which is above this worker; this process where there is none."""
    java = [parent.pid for parent in psutil.Process().parents() if parent.name() == "java"]
    return java[0] if java else os.getpid()


class RefusedError(RuntimeError):
    """The hub will not have this task run fn."""


def meet(link: Link, attempt: int, start_timeout: float) -> Link | None:
    """Say hello to the hub and wait until every rank has.

    Returns:
        The link, or None when the ranks have to meet elsewhere because some of them cannot reach this hub.

    Raises:
        RefusedError: the task was started a second time, or the run has been stopped.
    """
    if not link.wait_connected(min(_CONNECT_WAIT, start_timeout)):
        link.close(discard=True)
        return None
    link.send("hello", attempt=attempt)
    message = link.wait(start_timeout)
    answer = "nothing" if message is None else message["type"]
    if answer == "met":
        return link
    link.close()
    if answer == "fallback":
        return None
    if answer == "refuse":
        assert message is not None
        raise RefusedError(
            f"Spark started the task of rank {link.rank} a second time (task attempts {message['first_attempt']} and "
            f"{attempt}). fn is never run twice unasked, because it may have had effects. Start the run again."
        )
    raise RefusedError(f"rank {link.rank} does not start: the run was stopped before all ranks had met ({answer}).")


def _meet_at_rank_0(
    spec: TaskSpec, me: RankInfo, layout: WorldLayout, context: BarrierTaskContext, closing: ExitStack
) -> Link:
    """Meet in a hub inside rank 0's task, whose address and keys travel by Spark's barrier messages."""
    address = b""
    if me.rank == 0:
        hub = Hub(HubState(me.size, timeout=spec.timeout), me.host)
        closing.callback(hub.close)
        address = pickle.dumps(hub.address)
    gathered = context.allGather(base64.b64encode(address).decode())  # costs a second: its wait polls once a second
    encoded = gathered[layout.rank_of.index(0)]
    link = meet(Link(pickle.loads(base64.b64decode(encoded)), me.rank), context.taskAttemptId(), spec.start_timeout)
    if link is None:
        raise RefusedError(
            f"rank {me.rank} on {me.host} can reach neither the driver nor rank 0 on {layout.ranks[0].host}. Open the "
            "network between the executors, or see spark.driver.host for the driver's address."
        )
    return link


def _print_here(stream: str, lines: list[str]) -> None:
    """Leave a rank's output in the log of the Spark executor."""
    target = sys.stdout if stream == "out" else sys.stderr
    target.write("".join(f"{line}\n" for line in lines))
    target.flush()


def host_of(address: str) -> str:
    """The host part of Spark's ``host:port``."""
    host, colon, port = address.rpartition(":")
    return host.strip("[]") if colon and port.isdigit() else address.strip("[]")


def rank_env(spec: TaskSpec, me: RankInfo, store_host: str, gpus: Sequence[str] | None) -> dict[str, str]:
    """The environment of a rank: this process', the variables that native libraries expect, then the user's.

    They are torchrun's variables, so that Lightning, Accelerate and plain ``env://`` initialisation feel at home.
    """
    ours: dict[str, str | None] = {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "LOCAL_RANK": str(me.local_rank),
        "LOCAL_WORLD_SIZE": str(me.local_size),
        "GROUP_RANK": str(me.cross_rank),
        "GROUP_WORLD_SIZE": str(me.cross_size),
        "MASTER_ADDR": store_host,  # MASTER_PORT follows when rank 0 has bound it
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: nobody may bind its port again
        "PYTHONUNBUFFERED": "1",
    }
    # Gloo would resolve this machine's name, which often gives 127.0.1.1 or nothing.
    if (interface := interface_of(me.host)) is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        ours["GLOO_SOCKET_IFNAME"] = interface
    if spec.cpus_per_proc is not None:
        ours["OMP_NUM_THREADS"] = str(spec.cpus_per_proc)  # Spark's own value is that of the application's tasks
    if gpus is not None:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return apply_env(os.environ, {**ours, **spec.env})
