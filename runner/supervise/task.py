"""The Spark task of a run: finds its ranks, connects to the other tasks, and supervises the ranks' processes."""

from __future__ import annotations

import base64
import functools
import gc
import itertools
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psutil

from spark_hvd.runner.channel.address import Address, NoAddressError, choose_address, own_addresses
from spark_hvd.runner.channel.link import HubAddress, Link
from spark_hvd.runner.channel.liveness import HEARTBEAT_SECONDS, SILENT_AFTER
from spark_hvd.runner.config import CommonConfig, RunConfig
from spark_hvd.runner.outcome.rows import Failed, FailureKind, PickledOutcome, to_rows
from spark_hvd.runner.rank.gpus import GpuError, GpuShare, devices_of, gpu_env
from spark_hvd.runner.rank.spec import RankSpec
from spark_hvd.runner.supervise.processes import ForkServer, apply_env, fork_server
from spark_hvd.runner.supervise.supervised import RankJob
from spark_hvd.runner.supervise.supervisor import not_started
from spark_hvd.runner.supervise.team import LostError, RefusedError, meet, supervise_all
from spark_hvd.world.layout import RankInfo, WorldLayout

if TYPE_CHECKING:
    import pyarrow
    from pyspark import BarrierTaskContext

    from spark_hvd.data.feeders.mapping import RowMap
    from spark_hvd.data.feeders.sockets import FeedAddress
    from spark_hvd.runner.channel.hub import Hub
    from spark_hvd.runner.supervise.mpi.launcher import MpiPlan

_spare_modules = functools.cache(gc.freeze)
"""Excludes the modules that this worker has imported from garbage collection. Spark's daemon collects once per task,
which takes 40 ms in each worker, and all workers of a run do so at once."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The driver's specification for every task of a run.

    Attributes:
        config: The options of the run.
        run_id: Unique name of the run.
        hub: The driver's hub; None if it cannot listen.
        spool: Directory for large values, if all tasks run on the driver's machine.
        may_share_gpus: Whether several ranks may use one GPU.
        generation: How often the ranks of this run were started before.
        secret: Secret from which the keys between ranks are derived. It travels only in Spark's closure.
        mpi_token: Name of the sockets over which MPI starts.
        sources: Pickled sources of data sets that ranks read themselves, by name.
        schemas: Schemas of data sets whose rows come to the tasks, see
            :class:`~spark_hvd.runner.spark.input.InputRows`.
        folders: Folders of data sets whose rows are on this host's disk.
        maps: The functions of mapped data sets, by name.
        feed: Address of the feeders; None if the functions run in the ranks.
    """

    config: CommonConfig = field(repr=False)
    run_id: str
    hub: HubAddress | None = field(repr=False)
    spool: str | None = None
    may_share_gpus: bool = False
    generation: int = 0
    secret: bytes = field(default_factory=functools.partial(secrets.token_bytes, 32), repr=False)
    mpi_token: str = field(default_factory=functools.partial(secrets.token_hex, 16), repr=False)
    sources: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    schemas: Mapping[str, tuple[int, bytes]] = field(default_factory=dict, repr=False)
    folders: Mapping[str, str] = field(default_factory=dict)
    maps: Mapping[str, RowMap] = field(default_factory=dict, repr=False)
    feed: FeedAddress | None = None

    @property
    def mpi(self) -> str | None:
        """The MPI library, "mpich" or "openmpi"; None for other backends."""
        asked = self.config
        return (asked.mpi or "mpich") if isinstance(asked, RunConfig) and asked.backend == "mpi" else None

    @property
    def procs_per_task(self) -> int:
        """The number of ranks in each Spark task."""
        return self.config.procs_per_task if isinstance(self.config, RunConfig) else 1

    def job(
        self,
        me: RankInfo,
        address: Address,
        gpus: Sequence[str] | None,
        payload: bytes,
        *,
        mpi: MpiPlan | None = None,
        join_timeout: float | None = None,
        watched: bool = True,
        slot: int | None = None,
        stream: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> RankJob:
        """Make the job for the supervisor of one rank.

        ``address`` is this host's address for other ranks. ``gpus`` are the GPUs that Spark assigned; None if it
        assigns none. ``mpi`` says how MPI starts; None for other backends. ``join_timeout`` is the number of seconds to
        join the others' world; by default ``start_timeout``. For ``slot``, see :class:`RankSpec`. ``stream``, the
        number of the stream of random numbers, is by default the rank. ``part`` says which part of how many the rank
        gets of the task's rows. ``watched`` says whether the rank sends records to the driver.
        """
        config = self.config
        # A CUDA_VISIBLE_DEVICES that the user has set is the same for all ranks, which divide it by local rank.
        assigned = None if "CUDA_VISIBLE_DEVICES" in config.env else gpus
        rank_spec = RankSpec(
            me=me,
            ip=address.ip,
            ports=config.port_range,
            backend=config.backend,
            gpus=GpuShare(assigned, config.gpus_per_proc, self.may_share_gpus),
            secret=self.secret,
            generation=self.generation,
            join_timeout=config.start_timeout if join_timeout is None else join_timeout,
            collective_timeout=config.collective_timeout,
            watched=watched,
            slot=slot,
            seed=config.seed,
            stream=me.rank if stream is None else stream,
            data=self._data(*part),
        )
        return RankJob(rank_spec, rank_env(self, me, address, gpus), payload, config.start_timeout, config.timeout, mpi)

    def _data(self, part: int, parts: int) -> dict[str, bytes]:
        found = dict(self.sources)
        if self.folders:
            from spark_hvd.data.spool import SpoolSource

            found |= {name: pickle.dumps(SpoolSource(folder, part, parts)) for name, folder in self.folders.items()}
        if self.maps:
            from spark_hvd.data.feeders.mapping import MappedSpec

            found |= {name: pickle.dumps(MappedSpec(found[name], each, self.feed)) for name, each in self.maps.items()}
        return found


def run_task(
    spec: TaskSpec, payload: bytes, batches: Iterator[pyarrow.RecordBatch] | None = None
) -> Iterator[pyarrow.RecordBatch]:
    """Run this task's ranks and yield their outcomes as record batches of the result schema."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    assert isinstance(context, BarrierTaskContext)
    _spare_modules()
    with ExitStack() as closing:
        if batches is not None:
            from spark_hvd.runner.supervise.incoming import Incoming

            incoming = Incoming(batches, spec.schemas)
            closing.callback(incoming.close)
            spec = replace(spec, folders=incoming.folders)
        packed = _run_ranks(spec, payload, context)
    for each in packed:
        if not each.ok and isinstance(failure := each.open(), Failed) and failure.kind is FailureKind.LOST:
            # Spark would wait for the lost rank's task until spark.network.timeout, two minutes. A failing task ends
            # a barrier job at once.
            raise LostError(f"SPARK_HVD_LOST: rank {failure.rank} on {failure.host} {failure.error}:END")
    yield from to_batches(packed, spec.spool)


def to_batches(packed: Iterable[PickledOutcome], spool: str | None) -> Iterator[pyarrow.RecordBatch]:
    """Convert outcomes to record batches of the result schema, for Spark."""
    import pyarrow

    kinds = pyarrow.int32(), pyarrow.bool_(), pyarrow.int32(), pyarrow.binary()
    for row in itertools.chain.from_iterable(to_rows(each, spool) for each in packed):
        columns = [pyarrow.array([value], kind) for value, kind in zip(row, kinds, strict=True)]
        yield pyarrow.RecordBatch.from_arrays(columns, names=["rank", "ok", "part", "chunk"])


def _run_ranks(spec: TaskSpec, payload: bytes, context: BarrierTaskContext) -> list[PickledOutcome]:
    # Every task sees the same list of hosts, so all compute the same ranks without exchanging messages.
    each = spec.procs_per_task
    hosts = [host_of(info.address) for info in context.getTaskInfos() for _ in range(each)]
    layout = WorldLayout.from_hosts(hosts)
    mine = [layout.of_process(context.partitionId() * each + place) for place in range(each)]
    gpus = context.resources().get("gpu")
    addresses = None if gpus is None else gpus.addresses
    server = fork_server(spec.config.env, executor_pid())  # imports torch while we connect to the others
    with ExitStack() as closing:
        links = None if spec.hub is None else [Link(spec.hub, me.rank, me.host) for me in mine]
        on_lines = None
        if links is None or not meet(links, context.taskAttemptId(), spec.config.start_timeout):
            on_lines = _print_here
            links = _meet_at_rank_0(spec, mine, layout, context, closing)
        for link in links:
            closing.callback(link.close)
        return run_ranks(spec, payload, layout, mine, links, server, addresses, on_lines)


def run_ranks(
    spec: TaskSpec,
    payload: bytes,
    layout: WorldLayout,
    mine: Sequence[RankInfo],
    links: Sequence[Link],
    server: ForkServer,
    gpus: Sequence[str] | None,
    on_lines: Callable[[str, list[str]], None] | None = None,
) -> list[PickledOutcome]:
    """Run this task's ranks after all ranks of the run have met.

    The caller has sent the hello message on ``links``, which are in the order of ``mine``. ``gpus`` are the GPUs that
    Spark assigned to this task; None if it assigns none. Output goes to ``on_lines`` (stream, lines), or to the hub if
    that is None.
    """
    towards = None if spec.hub is None else spec.hub.host
    alone = mine[0].local_size == mine[0].size
    try:
        address = choose_address(mine[0].host, spec.config.interfaces, towards, alone=alone, own=own_addresses())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = [devices_of(gpus, len(mine), place, visible, spec.config.gpus_per_proc) for place in range(len(mine))]
    except (NoAddressError, GpuError) as error:
        return [not_started(me, link, str(error)) for me, link in zip(mine, links, strict=True)]
    mpi = None
    if spec.mpi is not None:
        # Few tasks need MPI, or the hub below, so only those import them.
        from spark_hvd.runner.supervise.mpi.launcher import MpiPlan

        mpi = MpiPlan(layout, spec.mpi, spec.mpi_token, address, spec.config.port_range)
    jobs = [
        spec.job(
            me,
            address,
            share,
            payload,
            mpi=mpi,
            watched=on_lines is None,
            part=(layout.rank_of.index(me.rank), me.size),
        )
        for me, share in zip(mine, own, strict=True)
    ]
    return supervise_all(jobs, links, server, on_lines)


def executor_pid() -> int:
    """Return the process ID of the executor's JVM, which started Spark's daemon, which started this worker.

    If the daemon was killed and this worker has lost its parent, this finds the executor by its working directory.
    Without an executor, it returns this process's own ID.
    """
    java = [parent.pid for parent in psutil.Process().parents() if parent.name() == "java"]
    return (java or _executors_here() or [os.getpid()])[0]


def _executors_here() -> list[int]:
    here, found = os.getcwd(), []
    for process in psutil.process_iter(["pid", "name", "uids", "cwd", "cmdline"]):
        info = process.info  # values are None if access to them is denied
        if (
            info["name"] == "java"
            and info["uids"] is not None
            and info["uids"].effective == os.geteuid()
            and info["cwd"] == here
            and "--executor-id" in (info["cmdline"] or ())
        ):
            found.append(info["pid"])
    return found if len(found) == 1 else []


def _meet_at_rank_0(
    spec: TaskSpec, mine: Sequence[RankInfo], layout: WorldLayout, context: BarrierTaskContext, closing: ExitStack
) -> list[Link]:
    """Connect through a hub inside rank 0's task, whose address and keys Spark's barrier messages carry."""
    address = b""
    if mine[0].rank == 0:
        from spark_hvd.runner.channel.hub import Hub
        from spark_hvd.runner.channel.state import HubState

        hub = Hub(HubState(mine[0].size, timeout=spec.config.timeout), mine[0].host)
        closing.callback(_close_hub, hub)
        address = pickle.dumps(hub.address)
    gathered = context.allGather(base64.b64encode(address).decode())  # takes a second, as Spark polls once a second
    encoded = gathered[layout.rank_of.index(0) // spec.procs_per_task]
    hub_address = pickle.loads(base64.b64decode(encoded))
    hub_at = f"rank 0 on {layout.ranks[0].host}"
    links = [Link(hub_address, me.rank, me.host, hub_at=hub_at) for me in mine]
    if not meet(links, context.taskAttemptId(), spec.config.start_timeout):
        raise RefusedError(
            f"SPARK_HVD_UNREACHABLE: rank {mine[0].rank} on {mine[0].host} can reach neither the driver nor {hub_at}. "
            "Open the network between the executors, or see spark.driver.host for the driver's address.:END"
        )
    return links


def _close_hub(hub: Hub) -> None:
    """Close the hub once every rank has left or is lost; the driver cannot see that a task has gone silent."""
    from spark_hvd.runner.outcome.errors import check_hub

    hub.wait_gone(SILENT_AFTER + 2 * HEARTBEAT_SECONDS)
    lost = hub.lost
    hub.close()
    check_hub(hub.failure)
    if lost is not None:
        raise LostError(f"SPARK_HVD_LOST: lost {lost}; all other ranks were stopped:END")


def _print_here(stream: str, lines: list[str]) -> None:
    """Print a rank's output to the log of the Spark executor."""
    target = sys.stdout if stream == "out" else sys.stderr
    target.write("".join(f"{line}\n" for line in lines))
    target.flush()


def host_of(address: str) -> str:
    """Return the host of Spark's ``host:port``."""
    host, colon, port = address.rpartition(":")
    return host.strip("[]") if colon and port.isdigit() else address.strip("[]")


def rank_env(spec: TaskSpec, me: RankInfo, address: Address, gpus: Sequence[str] | None) -> dict[str, str]:
    """Return the environment of a rank: this process's, then variables for native libraries, then the user's.

    It includes torchrun's variables, for Lightning, Accelerate and plain ``env://`` initialisation. MASTER_ADDR and
    MASTER_PORT are added once rank 0 listens.
    """
    ours: dict[str, str | None] = {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "LOCAL_RANK": str(me.local_rank),
        "LOCAL_WORLD_SIZE": str(me.local_size),
        "GROUP_RANK": str(me.cross_rank),
        "GROUP_WORLD_SIZE": str(me.cross_size),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(spec.generation),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists already, so no rank may bind its port again
        "PYTHONUNBUFFERED": "1",
    }
    if address.interface is not None:
        # Gloo would resolve this machine's name, which often gives 127.0.1.1 or nothing.
        if spec.config.interfaces or "GLOO_SOCKET_IFNAME" not in os.environ:
            ours["GLOO_SOCKET_IFNAME"] = address.interface
        if spec.config.interfaces:
            ours["NCCL_SOCKET_IFNAME"] = f"={address.interface}"  # without "=", it would be a prefix
    if spec.mpi is not None:
        from spark_hvd.runner.supervise.mpi.launcher import MANAGERS

        only = address.interface if spec.config.interfaces or me.local_size == me.size else None
        ours |= MANAGERS[spec.mpi].rank_variables(only, spec.config.port_range)
    if spec.config.cpus_per_proc is not None:
        ours["OMP_NUM_THREADS"] = str(spec.config.cpus_per_proc)  # Spark's value ignores cpus_per_proc
    ours |= gpu_env(gpus, os.environ)
    return apply_env(os.environ, {**ours, **spec.config.env})
