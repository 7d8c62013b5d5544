"""Tests the connections that a run needs, from inside a task, and checks the results."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.channel.address import NoAddressError, choose_address, own_addresses
from spark_hvd.runner.channel.link import HubAddress, Link
from spark_hvd.runner.diagnosis.probe import host_key
from spark_hvd.runner.diagnosis.report import Finding, error, ok, warning
from spark_hvd.runner.outcome.rows import PickledOutcome
from spark_hvd.runner.supervise.task import host_of, to_batches
from spark_hvd.world.ports import PortRange, listen
from spark_hvd.world.words import count

if TYPE_CHECKING:
    import pyarrow
    from pyspark import BarrierTaskContext

CONNECT_SECONDS = 3.0
ALL_PAIRS_UP_TO = 16
"""With up to this many hosts, every pair is tried; with more, each host tries its neighbour and the first host."""


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """What every task should try. ``hub`` is the driver's hub, if it has one."""

    hub: HubAddress | None
    ports: PortRange | None
    interfaces: Sequence[str]


@dataclass(frozen=True, slots=True)
class TaskNetwork:
    """The results of one task.

    Attributes:
        partition: Number of the task.
        key: Key of its machine; see :func:`~spark_hvd.runner.diagnosis.probe.host_key`.
        name: Host name of its machine.
        address: The address by which other ranks will reach it; None if it has none.
        port: The port on which it listened; None if it could not.
        bind_error: Why it has no address, or cannot listen there.
        gpus: Addresses of the GPUs that Spark assigned; None if it assigned none.
        reaches_driver: Whether it reaches the driver; None if the driver does not listen.
        peers: For each task that it tried, by partition, why it cannot connect; None if it can.
        clock: Time of its machine while the stage ran, in seconds since the epoch.
    """

    partition: int
    key: str
    name: str
    address: str | None = None
    port: int | None = None
    bind_error: str | None = None
    gpus: list[str] | None = None
    reaches_driver: bool | None = None
    peers: dict[int, str | None] = field(default_factory=dict)
    clock: float = 0.0


def targets(index: int, count: int) -> list[int]:
    """Return which of ``count`` hosts number ``index`` tries: all others or, of many, its neighbour and the first."""
    if count <= ALL_PAIRS_UP_TO:
        return [other for other in range(count) if other != index]
    return sorted({0, (index + 1) % count} - {index})


def run_network_task(plan: NetworkPlan, payload: bytes) -> Iterator[pyarrow.RecordBatch]:
    """Yield the results of one barrier task; there is no payload."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    assert isinstance(context, BarrierTaskContext)
    yield from to_batches([PickledOutcome(context.partitionId(), True, pickle.dumps(_examine(plan, context)))], None)


def _examine(plan: NetworkPlan, context: BarrierTaskContext) -> TaskNetwork:
    """Try, from inside a barrier task, the connections that a rank in its place will need."""
    partition, gpus = context.partitionId(), context.resources().get("gpu")
    hosts = [host_of(info.address) for info in context.getTaskInfos()]
    me: dict[str, Any] = {
        "partition": partition,
        "key": host_key(),
        "name": socket.gethostname(),
        "gpus": None if gpus is None else list(gpus.addresses),
    }
    with contextlib.ExitStack() as closing:
        try:
            towards = None if plan.hub is None else plan.hub.host
            alone = len(set(hosts)) == 1
            me["address"] = choose_address(
                hosts[partition], plan.interfaces, towards, alone=alone, own=own_addresses()
            ).ip
            # The kernel completes connections to a listener, so nobody has to accept them.
            listener = closing.enter_context(contextlib.closing(listen(me["address"], plan.ports)))
            me["port"] = listener.getsockname()[1]
        except NoAddressError as error:
            me["bind_error"] = str(error)
        except OSError as error:
            me["bind_error"] = _text(error)
        reaches = None if plan.hub is None else reach_hub(plan.hub, partition)
        everyone = [json.loads(card) for card in context.allGather(json.dumps(me))]
        peers = _try_peers(me, everyone)
        context.barrier()  # keep listening until all tasks have tried
    return TaskNetwork(**me, reaches_driver=reaches, peers=peers, clock=time.time())


def reach_hub(hub: HubAddress, rank: int) -> bool:
    """Tell whether a task can connect to the driver's hub."""
    link = Link(hub, rank)
    try:
        return link.wait_connected(CONNECT_SECONDS)
    finally:
        link.close(discard=True)


def reach(host: str, port: int) -> str | None:
    """Connect to a listener and close the connection; return why that failed, or None."""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return _text(error)
    return None


def _text(error: OSError) -> str:
    return f"{type(error).__name__}: {error.strerror or error}"


def _try_peers(me: dict[str, Any], everyone: Sequence[dict[str, Any]]) -> dict[int, str | None]:
    """If this is the first task of its host, connect to one task on each host that it should try."""
    first: dict[str, dict[str, Any]] = {}
    for card in everyone:
        first.setdefault(card["key"], card)
    if first[me["key"]]["partition"] != me["partition"]:
        return {}
    hosts = list(first.values())
    index = [card["key"] for card in hosts].index(me["key"])
    chosen = [hosts[other] for other in targets(index, len(hosts)) if hosts[other].get("port")]
    # On its own host it tries the last task, because ranks of one host connect to each other, too.
    same_host = [card for card in everyone if card["key"] == me["key"] and card.get("port")]
    chosen += same_host[-1:]
    with ThreadPoolExecutor(16, "spark_hvd-reach") as pool:
        errors = pool.map(lambda card: reach(card["address"], card["port"]), chosen)
        return dict(zip((card["partition"] for card in chosen), errors, strict=True))


def check_driver(
    driver: tuple[str, int] | None, tasks: Sequence[TaskNetwork], *, connect: bool = False
) -> Iterator[Finding]:
    """Check that executors reach the driver.

    ``driver`` is the address on which it listened, if it could. ``connect`` marks a Spark Connect client, which listens
    on the local address of its route to the server.
    """
    setting = "--conf spark.driver.host=<an address that executors can reach>"
    if connect:
        setting = "# or run this program on a host that executors can reach, such as one of the cluster"
    if driver is None:
        yield warning(
            "executor to driver",
            "the driver has no address for executors: ranks connect without it, and their output stays in the "
            "executors' logs",
            setting if connect else f"--conf spark.driver.bindAddress=0.0.0.0 {setting}",
        )
        return
    where = f"{driver[0]}:{driver[1]}"
    if failed := [task.name for task in tasks if task.reaches_driver is False]:
        yield warning(
            "executor to driver",
            f"{', '.join(dict.fromkeys(failed))} cannot connect to {where} in {CONNECT_SECONDS:.0f} s. Runs work, but "
            "start ten seconds later, and ranks' output stays in the executors' logs",
            f'network=Network(ports="30000-30100")   # and open these ports of {driver[0]} to executors\n{setting}',
        )
    else:
        yield ok("executor to driver", f"all tasks reach {where}")


def check_ranks(tasks: Sequence[TaskNetwork], ports: PortRange | None) -> Iterator[Finding]:
    """Check that each rank can listen on an address, and that ranks reach each other there."""
    allowed = "any port" if ports is None else f"ports {ports}"
    by_partition = {task.partition: task for task in tasks}
    not_listening = [task for task in tasks if task.bind_error is not None]
    for task in not_listening:
        if task.address is None:
            found, remedy = f"{task.name}: {task.bind_error}", 'run(..., network=Network(interfaces=["10.0.0.0/8"]))'
        else:
            found = f"{task.name} cannot listen on {task.address}, {allowed}: {task.bind_error}"
            remedy = "ss -ltnp   # shows who holds the ports there; or pass a wider range in ports="
        yield error("rank to rank", found, remedy)
    tried = [(task, by_partition[other], why) for task in tasks for other, why in task.peers.items()]
    failures = [each for each in tried if each[2] is not None]
    for task, other, why in failures:
        yield error(
            "rank to rank",
            f"{task.name} ({task.address}) cannot connect to {other.name} ({other.address}:{other.port}): {why}",
            f"nc -vz {other.address} {other.port}   # from {task.name}, while something listens there\n"
            'Open all ports between the hosts, or pass network=Network(ports="30000-30100") and open those',
        )
    if tried and not failures and not not_listening:
        hosts = len({task.key for task in tasks})
        yield ok("rank to rank", f"{count(len(tried), 'connection')} between {count(hosts, 'host')} on {allowed}")


def clocks_ahead(tasks: Sequence[TaskNetwork], during: tuple[float, float]) -> dict[str, float]:
    """Return by how many seconds, at least, each host's clock is ahead of the driver's; negative if it is behind.

    ``during`` is the driver's time before and after the tasks ran. A clock between the two may be right, and gives 0.
    """
    start, end = during
    return {task.name: max(task.clock - end, 0.0) + min(task.clock - start, 0.0) for task in tasks}
