"""The members of a process set, and over what they talk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from spark_hvd.collectives.staging import Staging, open_memory
from spark_hvd.collectives.underway.slots import Slots
from spark_hvd.transport.communicator import Communicator
from spark_hvd.transport.connections import Abortable, Several
from spark_hvd.transport.distributed import MPI_BACKEND, TorchCommunicator
from spark_hvd.transport.groups import GROUP_PREFIX, Groups
from spark_hvd.transport.host.sliced import SlicedStaging
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
    slots: Slots | None = None
    """Memory for small all-reduces under known names, where they share any."""
    connections: Abortable | None = None
    """The connections of the communicator, where they can be aborted."""
    nccl: NcclGroups | None = None
    """The process groups that are aborted when one of the ranks has gone."""
    on_loss: Callable[[int, str], None] = lambda rank, text: None
    """Told the rank, in the world, that has left or is gone, and what is known of it."""
    sliced: SlicedStaging | None = None
    """Memory that the ranks of each host share, if there are several of several."""


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
    staging, slots = open_memory(group, hosts, config.shared_memory)
    communicator = TorchCommunicator(group)
    if dist.get_backend(group) != MPI_BACKEND:
        wanted = config.shared_memory and config.hierarchical_allreduce
        sliced = SlicedStaging.open(process_set_id, ranks, hosts, wanted, groups, group)
        ends = connections if sliced is None else Several([connections, sliced.connections, sliced])
        return Members(ranks, hosts, place, communicator, staging, slots, ends, nccl, sliced=sliced)
    on_loss = mpi_backend.on_loss("" if groups.owns_default_group else GROUP_PREFIX)
    endpoint = mpi_backend.endpoint_of(group)
    return Members(ranks, hosts, place, communicator, staging, slots, endpoint, on_loss=on_loss)
