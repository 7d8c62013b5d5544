"""Hosts made of Linux network namespaces: each with its own address, name, hosts file, /dev/shm and a cable to cut.

They are connected to one bridge, which also has an address for the driver. Everything is named after the bridge,
which the kernel lets only one process create, so several test processes can have hosts at the same time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NETNS = Path("/etc/netns")
_NOT_OF_HOSTS = ("GLOO_SOCKET_IFNAME", "SPARK_LOCAL_IP", "SPARK_PUBLIC_DNS", "SPARK_WORKER_DIR", "SPARK_LOCAL_DIRS")
_DEAD_MAC = "02:00:00:00:de:ad"
_BLOCKED = "213"
"""Routing table for traffic to a machine that does not exist."""


def why_not() -> str | None:
    """Return why hosts cannot be created here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "setpriv", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = subprocess.run(["ip", "netns", "add", name := f"probe{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode != 0:
        return f"no network namespace can be made: {probe.stderr.strip()}"
    sh("ip", "netns", "del", name)
    return None


def sh(*command: str) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Names:
    """What a host's own name resolves to there: ``own`` address, ``loopback`` (Debian's 127.0.1.1) or ``nothing``."""

    resolve_to: str = "own"

    def hosts_file(self, name: str, address: str) -> str:
        """Return the content of /etc/hosts."""
        own = {"own": f"{address} {name}\n", "loopback": f"127.0.1.1 {name}\n", "nothing": ""}[self.resolve_to]
        return f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{own}"


@dataclass(eq=False)
class Host:
    """One host.

    Attributes:
        name: Its host name and that of its network namespace.
        address: Its address on eth0; IPv6 if hosts have no other.
        second: Its address on eth1, or None if there is only one network.
        cables: The bridge's ends of eth0 and eth1.
    """

    name: str
    address: str
    second: str | None
    cables: tuple[str, ...]
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs ``command`` on this host, with the same process id."""
        setup = f'hostname {self.name}; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
        inside = ["unshare", "--uts", "--ipc", "sh", "-c", setup, "sh", *command]
        # If a test process is killed, so are its hosts' processes.
        return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.name, *inside]

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> str:
        """Run a command here to its end and return its output."""
        done = subprocess.run(
            self.command(*command), capture_output=True, text=True, env=environment(env), timeout=timeout
        )
        if done.returncode != 0:
            raise RuntimeError(f"on {self.name}: {' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, *command: str, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process here; it ends no later than the host."""
        with log.open("ab") as file:
            process = subprocess.Popen(self.command(*command), stdout=file, stderr=file, env=environment(env))
        self._started.append(process)
        return process

    def ip(self, *arguments: str) -> str:
        """Run ``ip`` on this host."""
        return sh("ip", "-n", self.name, *arguments)

    def pids(self) -> list[int]:
        """Return the processes that run here."""
        return [int(line) for line in sh("ip", "netns", "pids", self.name).split()]

    def end_processes(self) -> None:
        """Kill everything that runs here, and wait until it has ended."""
        deadline = time.monotonic() + 10
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()
            time.sleep(0.05)
        for process in self._started:
            process.wait(5)


def environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    """Return this process's environment without the variables that are specific to its own host."""
    kept = {key: value for key, value in os.environ.items() if key not in _NOT_OF_HOSTS}
    return {**kept, **(changes or {})}


@dataclass(eq=False)
class Hosts:
    """A network of hosts; made by :func:`make_hosts`.

    Attributes:
        number: Number of this network, the third byte of its addresses.
        driver: The driver's address, on the bridge.
        hosts: The hosts.
        six: Whether addresses are IPv6.
    """

    number: int
    driver: str
    six: bool
    hosts: list[Host] = field(default_factory=list)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def at(self, address: str) -> Host:
        """Return the host with an address."""
        return next(host for host in self.hosts if host.address == address)

    def cut(self, host: Host) -> None:
        """Disconnect the host."""
        for cable in host.cables:
            sh("ip", "link", "set", cable, "down")

    def mend(self, host: Host) -> None:
        """Undo :meth:`cut`, :meth:`shape` and :meth:`block`."""
        for cable in host.cables:
            sh("ip", "link", "set", cable, "up")
            subprocess.run(["tc", "qdisc", "del", "dev", cable, "root"], capture_output=True)
        for index in range(len(host.cables)):
            subprocess.run(["tc", "-n", host.name, "qdisc", "del", "dev", f"eth{index}", "root"], capture_output=True)
        family = "-6" if self.six else "-4"
        while (
            subprocess.run(
                ["ip", "-n", host.name, family, "rule", "del", "table", _BLOCKED], capture_output=True
            ).returncode
            == 0
        ):
            pass
        subprocess.run(["ip", "-n", host.name, family, "route", "flush", "table", _BLOCKED], capture_output=True)

    def shape(self, host: Host, rate: str, burst: str = "256kb") -> None:
        """Limit the host's outgoing and incoming traffic to a rate such as "100mbit"."""
        limit = ["root", "tbf", "rate", rate, "burst", burst, "latency", "100ms"]
        for index, cable in enumerate(host.cables):
            sh("tc", "qdisc", "replace", "dev", cable, *limit)
            sh("tc", "-n", host.name, "qdisc", "replace", "dev", f"eth{index}", *limit)

    def block(self, host: Host, to: str, ports: str | None = None) -> None:
        """Silently drop what the host sends to an address, like a firewall.

        Args:
            host: The sender.
            to: The address.
            ports: "N" or "FROM-TO" (65534 at most) for TCP to these ports only.
        """
        nobody = f"fd42:213:{self.number:x}::dead" if self.six else f"10.213.{self.number}.254"
        family = "-6" if self.six else "-4"
        host.ip("neigh", "replace", nobody, "lladdr", _DEAD_MAC, "dev", "eth0", "nud", "permanent")
        host.ip(family, "route", "replace", "default", "via", nobody, "dev", "eth0", "table", _BLOCKED)
        which = ["ipproto", "tcp", "dport", ports] if ports else []
        host.ip(family, "rule", "add", "to", to, *which, "table", _BLOCKED, "pref", "100")


@contextlib.contextmanager
def make_hosts(
    count: int, *, names: Sequence[Names] = (), two_networks: bool = False, six: bool = False
) -> Iterator[Hosts]:
    """Create hosts, and remove them with everything that runs on them.

    Args:
        count: Number of hosts.
        names: What each host's name resolves to.
        two_networks: Whether each has an eth1 in a second network, on the same bridge.
        six: Whether they have IPv6 addresses instead of IPv4 addresses.
    """
    with contextlib.ExitStack() as undo:
        number, bridge = _bridge()
        undo.callback(sh, "ip", "link", "del", bridge)
        four, four_second, six_first = f"10.213.{number}", f"10.214.{number}", f"fd42:213:{number:x}:"
        hosts = Hosts(number, f"{six_first}:1" if six else f"{four}.1", six)
        for address in [f"{six_first}:1/64"] if six else [f"{four}.1/24", f"{four_second}.1/24"]:
            sh("ip", "addr", "add", address, "dev", bridge, *(["nodad"] if six else []))
        sh("ip", "link", "set", bridge, "up")
        for index in range(count):
            end = 11 + index
            host = Host(
                f"hvd{number}-{index}",
                f"{six_first}:{end}" if six else f"{four}.{end}",
                f"{four_second}.{end}" if two_networks else None,
                tuple(f"hv{number}-{index}-{cable}" for cable in range(2 if two_networks else 1)),
            )
            sh("ip", "netns", "add", host.name)
            undo.callback(sh, "ip", "netns", "del", host.name)
            undo.callback(host.end_processes)
            undo.callback(_forget_names, host)
            undo.callback(_remove_cables, host)  # the namespace would remove them too, but later
            hosts.hosts.append(host)
            _connect(host, bridge)
        for index, host in enumerate(hosts.hosts):
            _write_names(host, hosts, names[index] if names else Names())
        yield hosts


def _bridge() -> tuple[int, str]:
    for number in range(1, 250):
        name = f"hvdbr{number}"
        if _abandoned(name):
            _sweep(number, name)
        made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True)
        if made.returncode == 0:
            sh("ip", "link", "set", name, "alias", f"of process {os.getpid()}")
            return number, name
        if "File exists" not in made.stderr:
            raise RuntimeError(f"no bridge can be made: {made.stderr.strip()}")
    raise RuntimeError("249 bridges are in use by other tests (ip link show type bridge)")


def _abandoned(bridge: str) -> bool:
    """Return whether a bridge's process was killed before it could clean up."""
    try:
        owner = Path("/sys/class/net", bridge, "ifalias").read_text().split()
    except OSError:
        return False
    return bool(owner) and not Path("/proc", owner[-1]).exists()


def _sweep(number: int, bridge: str) -> None:
    """Remove hosts of a process that was killed; their processes were killed along with it."""
    for line in sh("ip", "netns", "list").splitlines():
        if (name := line.split()[0]).startswith(f"hvd{number}-"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(_NETNS / name, ignore_errors=True)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _remove_cables(host: Host) -> None:
    for cable in host.cables:
        subprocess.run(["ip", "link", "del", cable], capture_output=True)


def _connect(host: Host, bridge: str) -> None:
    host.ip("link", "set", "lo", "up")
    _remove_cables(host)  # of an earlier test that was killed, because this number is ours alone
    for index, (cable, address) in enumerate(zip(host.cables, (host.address, host.second), strict=False)):
        assert address is not None
        nic = f"eth{index}"
        sh("ip", "link", "add", cable, "type", "veth", "peer", "name", nic, "netns", host.name)
        sh("ip", "link", "set", cable, "master", bridge, "up")
        six = ":" in address
        host.ip("addr", "add", f"{address}/64" if six else f"{address}/24", "dev", nic, *(["nodad"] if six else []))
        host.ip("link", "set", nic, "up")


def _write_names(host: Host, hosts: Hosts, names: Names) -> None:
    folder = _NETNS / host.name
    folder.mkdir(parents=True)
    others = "".join(f"{other.address} {other.name}\n" for other in hosts.hosts if other is not host)
    (folder / "hosts").write_text(names.hosts_file(host.name, host.address) + others)
    (folder / "resolv.conf").write_text("# no name server\n")


def _forget_names(host: Host) -> None:
    shutil.rmtree(_NETNS / host.name, ignore_errors=True)
    with contextlib.suppress(OSError):  # other test processes may have hosts
        _NETNS.rmdir()
