"""The members of a process set, and over what they talk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from spark_hvd.collectives.staging import Staging
from spark_hvd.transport.communicator import Communicator
from spark_hvd.transport.connections import Abortable
from spark_hvd.transport.distributed import MPI_BACKEND, TorchCommunicator
from spark_hvd.transport.groups import GROUP_PREFIX, Groups
from spark_hvd.transport.local import LocalCommunicator
from spark_hvd.transport.mpi import backend as mpi_backend
from spark_hvd.transport.nccl import NcclGroups
from spark_hvd.world.config import Config
from spark_hvd.world.layout import WorldLayout


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a process set, as one of them sees them."""

    ranks: Sequence[int]
    """The ranks of the members in the world, ascending."""
    hosts: Sequence[str]
    """The host of each member."""
    place: int
    """The place of this rank among the members."""
    communicator: Communicator
    """The communicator over process groups that nobody else uses."""
    staging: Staging | None = None
    """Memory that they share, if they do."""
    connections: Abortable | None = None
    """The connections of the communicator, where they can be aborted."""
    nccl: NcclGroups | None = None
    """The process groups that are aborted when one of the ranks has gone."""
    on_loss: Callable[[int, str], None] = lambda rank, text: None
    """Told the rank, in the world, that has left or is gone, and what is known of it."""


def open_members(
    process_set_id: int,
    ranks: Sequence[int],
    layout: WorldLayout,
    me: int,
    groups: Groups,
    config: Config,
    nccl: NcclGroups,
) -> Members:
    """Make what the ranks of a process set talk over; each of them must call this.

    Args:
        process_set_id: 0 for all ranks.
        ranks: In the world, ascending.
        layout: Of the world.
        me: My rank in the world.
        groups: Of the world.
        config: Says whether to use shared memory.
        nccl: All process groups that are of no use any more when one of the ranks has gone.
    """
    hosts = [layout.ranks[rank].host for rank in ranks]
    place = list(ranks).index(me)
    if len(ranks) == 1:
        return Members(ranks, hosts, place, LocalCommunicator())
    group, connections = groups.make_known(process_set_id, ranks)
    staging = Staging.open(group, hosts, config.shared_memory)
    communicator = TorchCommunicator(group)
    if dist.get_backend(group) != MPI_BACKEND:
        return Members(ranks, hosts, place, communicator, staging, connections, nccl)
    on_loss = mpi_backend.on_loss("" if groups.owns_default_group else GROUP_PREFIX)
    endpoint = mpi_backend.endpoint_of(group)
    return Members(ranks, hosts, place, communicator, staging, endpoint, on_loss=on_loss)
