"""From connections that were tried and all-reduces that were timed to findings."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence

from spark_hvd.runner.diagnosis.allreduce import Measured
from spark_hvd.runner.diagnosis.network import TaskNetwork
from spark_hvd.runner.diagnosis.report import Finding, error, ok, warning
from spark_hvd.world.ports import PortRange
from spark_hvd.world.words import count

_SLOW = 3.0
"""A pair this many times slower than the median pair is named."""


def check_driver_ways(
    driver: tuple[str, int] | None, tasks: Sequence[TaskNetwork], silent: Collection[str], *, connect: bool = False
) -> Iterator[Finding]:
    """Whether executors reach the driver, and the driver them.

    Args:
        driver: Where the driver listened; None where it could not, or has no address.
        tasks: What the tasks found.
        silent: Hosts whose executors do not answer the driver.
        connect: Whether the driver is a client of Spark Connect, whose address is that of its way to the server.
    """
    setting = "--conf spark.driver.host=<an address that executors reach>"
    if connect:
        setting = "# or run this program on a host that executors reach, such as one of the cluster"
    if driver is None:
        yield warning(
            "executor to driver",
            "the driver has no address for executors: ranks meet among themselves, and their output stays in the "
            "executors' logs",
            setting if connect else f"--conf spark.driver.bindAddress=0.0.0.0 {setting}",
        )
        return
    failed = {task.name: task.driver.error for task in tasks if task.driver is not None and task.driver.error}
    if failed:
        yield warning(
            "executor to driver",
            f"{'; '.join(f'{name}: {error}' for name, error in failed.items())} (to {driver[0]}:{driver[1]}). Runs "
            "work, but start ten seconds later, and the ranks' output stays in the executors' logs",
            f'run(..., ports="30000-30100")   # and open these ports of {driver[0]} for the executors\n{setting}',
        )
    else:
        slowest = max((task.driver.rtt for task in tasks if task.driver is not None), default=0.0)
        yield ok("executor to driver", f"all tasks reach {driver[0]}:{driver[1]}, there and back in {_ms(slowest)}")
    if silent:
        hosts = ", ".join(sorted(silent))
        yield ok(
            "driver to executor", f"the driver cannot connect to {hosts}; no run needs it to, a restart waits longer"
        )


def check_rank_ways(tasks: Sequence[TaskNetwork], ports: PortRange | None) -> Iterator[Finding]:
    """Whether ranks can listen on an address of their own, and reach each other there."""
    allowed = "any port" if ports is None else f"ports {ports}"
    by_partition = {task.partition: task for task in tasks}
    deaf = [task for task in tasks if task.bind_error is not None]
    for task in deaf:
        if task.address is None:
            found, remedy = f"{task.name}: {task.bind_error}", 'run(..., interfaces=["10.0.0.0/8"])'
        else:
            found = f"{task.name} cannot listen on {task.address}, {allowed}: {task.bind_error}"
            remedy = "ss -ltnp   # who holds the ports there; or a wider range in ports="
        yield error("rank to rank", found, remedy)
    broken = [
        (task, by_partition[partition], way)
        for task in tasks
        for partition, way in task.peers.items()
        if way.error is not None
    ]
    for task, other, way in broken:
        yield error(
            "rank to rank",
            f"{task.name} ({task.address}) cannot connect to {other.name} ({other.address}:{other.port}): {way.error}",
            f"nc -vz {other.address} {other.port}   # from {task.name}, while something listens there\n"
            'Open the hosts to each other for all ports, or run(..., ports="30000-30100") and open these',
        )
    ways = [way.rtt for task in tasks for way in task.peers.values() if way.error is None]
    if ways and not broken and not deaf:
        hosts = len({task.key for task in tasks})
        yield ok(
            "rank to rank",
            f"{count(len(ways), 'connection')} between {count(hosts, 'host')} on {allowed}: there and back in "
            f"{_ms(statistics.median(ways))}, {_ms(max(ways))} at most",
        )


def check_allreduce(measured: Sequence[Measured]) -> Iterator[Finding]:
    """How fast ranks all-reduce, and which pair of hosts is slower than the others."""
    for result in measured:
        if result.transport and result is measured[0]:
            yield ok("all-reduce", f"{len(result.ranks)} ranks: {_speed(result)}")
    pairs = list(measured[1:])
    if not pairs:
        return
    usual = statistics.median(pair.gb_per_s for pair in pairs)
    slow = [pair for pair in pairs if pair.gb_per_s * _SLOW < usual]
    for pair in slow:
        yield warning(
            "all-reduce of pairs",
            f"{' and '.join(pair.ranks)}: {_speed(pair)}, where the median pair reaches {_rate(usual)}",
            f"iperf3 -s   # on {pair.ranks[0]}; then on {pair.ranks[1]}: iperf3 -c {pair.ranks[0]}",
        )
    if not slow:
        each = ", ".join(f"{' with '.join(pair.ranks)} {_rate(pair.gb_per_s)}" for pair in pairs[:8])
        more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
        yield ok("all-reduce of pairs", f"{pairs[0].transport}: {each}{more}")


def _speed(result: Measured) -> str:
    return f"{_rate(result.gb_per_s)} over {result.transport} ({_bytes(result.bytes)} in {_ms(result.seconds)})"


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f} GB/s" if gb_per_s >= 0.1 else f"{gb_per_s * 1e3:.1f} MB/s"


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
