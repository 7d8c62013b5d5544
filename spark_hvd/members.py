"""Who shares a named lane, and over what they talk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_hvd.communicator import Communicator
from spark_hvd.connections import Connections
from spark_hvd.nccl import NcclGroups
from spark_hvd.staging import Staging


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a process set, as one of them sees them."""

    ranks: Sequence[int]
    """In the world, ascending."""
    hosts: Sequence[str]
    """Of each."""
    place: int
    """Mine among them."""
    communicator: Communicator
    """Over process groups that nobody else uses."""
    staging: Staging | None = None
    """Memory that they share, if they do."""
    connections: Connections | None = None
    """Of the communicator."""
    nccl: NcclGroups | None = None
    """All process groups that are of no use any more when one of the ranks has gone."""
