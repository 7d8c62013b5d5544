"""The specification of a rank, sent to its process as the header of the first frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_hvd.runner.rank.gpus import GpuShare
from spark_hvd.world.layout import RankInfo
from spark_hvd.world.ports import PortRange


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The settings that a rank needs before it runs the user's function.

    Attributes:
        me: The rank; in an elastic run, its first place.
        ip: This host's address, at which other ranks reach it.
        ports: Ports on which ranks listen; None means any.
        backend: "gloo", "nccl", "mpi", or None for Gloo and NCCL.
        gpus: The rank's GPUs.
        secret: Secret of the world, from which the keys between ranks are derived.
        generation: Number of the world; in an elastic run, the agent sends it later.
        join_timeout: Seconds to join the world of the others.
        collective_timeout: Seconds after which a collective fails if peers do not join it.
        watched: Whether the rank sends records of its progress to the driver.
        slot: In an elastic run, a number that is unique among the agents of the host; otherwise None.
        seed: Seed of the run's random numbers; None for different ones in each run.
        stream: Number of this rank's stream of random numbers; no other rank of the run has ever had it.
        data: Pickled sources of the run's data sets, by name.
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
        """Return plain data for JSON. It contains the secret, so send it only over the rank's own socket pair."""
        data = {name: source.hex() for name, source in self.data.items()}
        return {**asdict(self), "secret": self.secret.hex(), "data": data}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankSpec:
        """Invert :meth:`to_message`."""
        made = {
            "me": RankInfo(**message["me"]),
            "ports": None if message["ports"] is None else PortRange(**message["ports"]),
            "gpus": GpuShare(**message["gpus"]),
            "secret": bytes.fromhex(message["secret"]),
            "data": {name: bytes.fromhex(source) for name, source in message["data"].items()},
        }
        return cls(**{**message, **made})
