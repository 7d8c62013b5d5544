"""What a rendezvous yields: who I am, and where the ranks' key-value store listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_hvd.world.layout import RankInfo
from spark_hvd.world.ports import PortRange

if TYPE_CHECKING:
    from spark_hvd.transport.mpi.library import MPI


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
    """None where no socket is needed: a world of one."""
    generation: int = 0
    """Counts the times that the membership changed; keys of different generations never meet."""
    secret: bytes | None = field(default=None, repr=False)
    """From which the keys of the ranks' channels are derived; None where the launcher made none."""
    ports: PortRange | None = None
    """Where ranks listen for each other; None for any port. Gloo and NCCL choose their own."""
    mpi: MPI.Intracomm | None = field(default=None, repr=False)
    """The MPI communicator whose ranks are the world's, where that is not MPI_COMM_WORLD."""
