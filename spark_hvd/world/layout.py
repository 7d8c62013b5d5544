"""Computes where every rank runs, from the list of hosts alone, so that processes agree without a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.world.ports import PortRange

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank's place in the world, in Horovod's terms."""

    rank: int
    """0 .. size - 1."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Position among the ranks of the same host."""
    local_size: int
    """Number of ranks on the same host."""
    cross_rank: int
    """Position of this host among the hosts that have a rank with this local_rank."""
    cross_size: int
    """Number of hosts that have a rank with this local_rank."""
    host: str
    """The host's name or address, as the launcher knows it."""


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """All ranks of a world, and which process of the launcher became which rank."""

    ranks: tuple[RankInfo, ...]
    """The ranks, in rank order."""
    rank_of: tuple[int, ...]
    """`rank_of[i]` is the rank of the launcher's process i."""

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> WorldLayout:
        """Lay out ranks so that those of one host are contiguous.

        Hosts come in the order of their first appearance, the processes of a host in the order given. ``hosts[i]`` is
        the host of the launcher's process i.

        Raises:
            ValueError: `hosts` is empty.
        """
        _require_ranks(hosts)
        first_seen = {host: position for position, host in reversed(list(enumerate(hosts)))}
        processes = sorted(range(len(hosts)), key=lambda process: (first_seen[hosts[process]], process))
        rank_of = [0] * len(hosts)
        for rank, process in enumerate(processes):
            rank_of[process] = rank
        ordered = [hosts[process] for process in processes]
        return cls(_place(ordered, ordered), tuple(rank_of))

    @classmethod
    def of_ranks(cls, hosts: Sequence[str], nodes: Sequence[Hashable] | None = None) -> WorldLayout:
        """Lay out ranks whose numbers a launcher has already fixed: rank i stays rank i.

        ``nodes`` identify the hosts where names do not, such as the numbers of the launcher's agents.

        Raises:
            ValueError: `hosts` is empty.
        """
        _require_ranks(hosts)
        return cls(_place(hosts, hosts if nodes is None else nodes), tuple(range(len(hosts))))

    def of_process(self, process: int) -> RankInfo:
        """Return the place of the launcher's process number `process`."""
        return self.ranks[self.rank_of[process]]

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({info.local_size for info in self.ranks}) == 1


def ranks_in(comm: Any, size: int) -> list[int]:
    """Return the ranks of a list, ascending.

    Raises:
        ValueError: ``comm`` is not a list of ranks of a world of this size.
    """
    if not isinstance(comm, Sequence) or not all(isinstance(rank, int) and 0 <= rank < size for rank in comm):
        raise ValueError(f"comm={comm!r}: expected a list of ranks from 0 to {size - 1}.")
    return sorted(set(comm))


def _require_ranks(hosts: Sequence[str]) -> None:
    if not hosts:
        raise ValueError("hosts is empty: a world has at least one rank; pass one host for every process.")


def _place(hosts: Sequence[str], nodes: Sequence[Hashable]) -> tuple[RankInfo, ...]:
    local_sizes = Counter(nodes)
    met: Counter[Hashable] = Counter()
    # As in Horovod, a cross group holds one rank per host, all with the same local rank; hosts with fewer ranks lack
    # it.
    cross: list[list[Hashable]] = [[] for _ in range(max(local_sizes.values()))]
    local_ranks = []
    for node in nodes:
        local_ranks.append(met[node])
        cross[met[node]].append(node)
        met[node] += 1
    host_order = {node: position for position, node in enumerate(dict.fromkeys(nodes))}
    for members in cross:
        members.sort(key=host_order.__getitem__)
    return tuple(
        RankInfo(
            rank=rank,
            size=len(nodes),
            local_rank=local_rank,
            local_size=local_sizes[node],
            cross_rank=cross[local_rank].index(node),
            cross_size=len(cross[local_rank]),
            host=host,
        )
        for rank, (host, node, local_rank) in enumerate(zip(hosts, nodes, local_ranks, strict=True))
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where rank 0's key-value store listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class World:
    """One generation of a set of ranks, as seen by one of them."""

    me: RankInfo
    endpoint: Endpoint | None
    """Where ranks meet; None in a world of one, which needs no socket."""
    generation: int = 0
    """Counts changes of the membership; keys of different generations never collide."""
    secret: bytes | None = field(default=None, repr=False)
    """The secret from which the keys of the ranks' channels are derived; None if the launcher made none."""
    ports: PortRange | None = None
    """Where ranks listen for each other; None for any port. Gloo and NCCL choose their own."""
    mpi: MPI.Intracomm | None = field(default=None, repr=False)
    """The MPI communicator whose ranks form the world, if that is not MPI_COMM_WORLD."""
