"""From connections that were tried to findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spark_hvd.runner.diagnosis.network import CONNECT_SECONDS, TaskNetwork
from spark_hvd.runner.diagnosis.report import Finding, error, ok, warning
from spark_hvd.world.ports import PortRange
from spark_hvd.world.words import count


def check_driver(
    driver: tuple[str, int] | None, tasks: Sequence[TaskNetwork], *, connect: bool = False
) -> Iterator[Finding]:
    """Whether executors reach the driver.

    Args:
        driver: Where the driver listened; None where it could not, or has no address.
        tasks: What the tasks found.
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
    where = f"{driver[0]}:{driver[1]}"
    if failed := [task.name for task in tasks if task.reaches_driver is False]:
        yield warning(
            "executor to driver",
            f"{', '.join(dict.fromkeys(failed))} cannot connect to {where} in {CONNECT_SECONDS:.0f} s. Runs work, but "
            "start ten seconds later, and the ranks' output stays in the executors' logs",
            f'network=Network(ports="30000-30100")   # and open these ports of {driver[0]} to executors\n{setting}',
        )
    else:
        yield ok("executor to driver", f"all tasks reach {where}")


def check_ranks(tasks: Sequence[TaskNetwork], ports: PortRange | None) -> Iterator[Finding]:
    """Whether ranks can listen on an address of their own, and reach each other there."""
    allowed = "any port" if ports is None else f"ports {ports}"
    by_partition = {task.partition: task for task in tasks}
    deaf = [task for task in tasks if task.bind_error is not None]
    for task in deaf:
        if task.address is None:
            found, remedy = f"{task.name}: {task.bind_error}", 'run(..., network=Network(interfaces=["10.0.0.0/8"]))'
        else:
            found = f"{task.name} cannot listen on {task.address}, {allowed}: {task.bind_error}"
            remedy = "ss -ltnp   # who holds the ports there; or a wider range in ports="
        yield error("rank to rank", found, remedy)
    tried = [(task, by_partition[other], why) for task in tasks for other, why in task.peers.items()]
    broken = [each for each in tried if each[2] is not None]
    for task, other, why in broken:
        yield error(
            "rank to rank",
            f"{task.name} ({task.address}) cannot connect to {other.name} ({other.address}:{other.port}): {why}",
            f"nc -vz {other.address} {other.port}   # from {task.name}, while something listens there\n"
            'Open the hosts to each other for all ports, or give network=Network(ports="30000-30100") and open these',
        )
    if tried and not broken and not deaf:
        hosts = len({task.key for task in tasks})
        yield ok("rank to rank", f"{count(len(tried), 'connection')} between {count(hosts, 'host')} on {allowed}")


def clocks_ahead(tasks: Sequence[TaskNetwork], during: tuple[float, float]) -> dict[str, float]:
    """Seconds by which hosts' clocks are ahead of the driver's, at least; below 0 behind it.

    Args:
        tasks: What the tasks found.
        during: The driver's time before and after they ran: a clock between the two may be right.
    """
    began, ended = during
    return {task.name: max(task.clock - ended, 0.0) + min(task.clock - began, 0.0) for task in tasks}
