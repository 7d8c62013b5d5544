"""What a rank's process is told to do: the header of its first frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_hvd.runner.rank.gpus import GpuShare
from spark_hvd.world.layout import RankInfo
from spark_hvd.world.ports import PortRange


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """See the module's description.

    Attributes:
        me: The rank; of an elastic run, its first place.
        ip: This host's address, by which other ranks reach it.
        ports: Where ranks may listen; None for any port.
        backend: "gloo", "nccl", "mpi", or None for Gloo and NCCL.
        gpus: What the rank is told of its GPUs.
        secret: The world's, from which the keys between ranks are derived.
        generation: The world's; of an elastic run, its agent tells.
        join_timeout: Seconds to join the others' world.
        collective_timeout: Seconds after which a collective that peers do not join fails.
        watched: Whether the driver hears how far the rank is.
        slot: Of an elastic run: a number that no other agent of the host has. None for a static one.
        seed: The run's, of random numbers; None for others in each run.
        stream: Which of the seed's streams is this rank's; no other rank of the run has had it.
        data: The sources of the run's data sets, pickled, by name.
    """

    me: RankInfo
    ip: str
    ports: PortRange | None
    backend: str | None
    gpus: GpuShare
    secret: bytes = field(repr=False)
    generation: int
    join_timeout: float
    collective_timeout: float
    watched: bool = True
    slot: int | None = None
    seed: int | None = None
    stream: int
    data: Mapping[str, bytes] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """Plain data that JSON can carry: over the anonymous socket pair of this rank alone."""
        data = {name: source.hex() for name, source in self.data.items()}
        return {**asdict(self), "secret": self.secret.hex(), "data": data}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankOrder:
        """What :meth:`to_message` made."""
        made = {
            "me": RankInfo(**message["me"]),
            "ports": None if message["ports"] is None else PortRange(**message["ports"]),
            "gpus": GpuShare(**message["gpus"]),
            "secret": bytes.fromhex(message["secret"]),
            "data": {name: bytes.fromhex(source) for name, source in message["data"].items()},
        }
        return cls(**{**message, **made})
