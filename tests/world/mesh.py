"""The connections of the ranks of one world, and collectives over them: each rank has its own end of each."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from spark_hvd.transport.communicator import Communicator, ReduceOp
from spark_hvd.transport.handles import FinishedHandle
from spark_hvd.world.errors import CollectiveError
from tests.world.clock import strand
from tests.world.wire import Pipe

if TYPE_CHECKING:
    from tests.world.named import Named
    from tests.world.ranks import RankProcess


_CPU = torch.device("cpu")


class Mesh(Communicator):
    """One rank's end of a world.

    Args:
        process: The rank's process.
        generation: The world's generation.
        rank: This rank.
        members: The processes of all ranks.
        timeout: Seconds after which a collective fails.
    """

    def __init__(
        self, process: RankProcess, generation: int, rank: int, members: list[RankProcess], timeout: float
    ) -> None:
        self.process, self.generation, self.members = process, generation, members
        self.rank, self.size, self.fact_device, self._timeout = rank, len(members), _CPU, timeout
        self._count = 0
        self._parts: dict[int, dict[int, Any]] = {}
        self._gone: set[int] = set()
        self.broken: str | None = None
        self._closed = False
        self.named: Named | None = None
        network, process.mesh = process.world.network, self
        self._pipes = {
            number: Pipe(network, process.host, other.host, lambda m, other=other: other.receive(generation, rank, m))  # type: ignore[misc]
            for number, other in enumerate(members)
            if other is not process
        }
        for sender, message in process.mail.pop(generation, []):
            self.take(sender, message)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> Any:
        assert op is ReduceOp.MAX
        told = self.exchange("allreduce", tensor.tolist())
        return FinishedHandle(torch.tensor([max(numbers) for numbers in zip(*told, strict=True)]))

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Return all ranks' values, in rank order; blocks.

        Raises:
            CollectiveError: A peer or the network failed.
        """
        number, self._count = self._count, self._count + 1
        data = pickle.dumps((what, mine))
        for pipe in self._pipes.values():
            pipe.send((number, data))
        parts = self._parts.setdefault(number, {})
        parts[self.rank] = data

        def settled() -> bool:
            return self.broken is not None or len(parts) == self.size or bool(self._gone - parts.keys())

        registry = self.process.global_state.registry
        if not strand().wait(settled, self._timeout):
            self._fail("Timed out waiting for recv: connection closed")
        if self.broken is None and len(parts) < self.size:
            self._fail(f"Connection closed by peer: rank {min(self._gone - parts.keys())} has gone")
        if self.broken is not None:
            raise CollectiveError(registry.broken if registry is not None and registry.broken else self.broken)
        del self._parts[number]
        told = [pickle.loads(parts[rank]) for rank in range(self.size)]
        assert {theirs for theirs, _ in told} == {what}, f"ranks are in different collectives: {told}"
        return [given for _, given in told]

    def take(self, sender: int, message: tuple[int, bytes] | None) -> None:
        """Take a message from a peer: a part of a collective, or the end of the connection."""
        if message is None:
            self._gone.add(sender)
        else:
            self._parts.setdefault(message[0], {})[sender] = message[1]
        self.process.strand.poke()

    def abort(self) -> None:
        """End all connections; collectives in flight here fail."""
        self.broken = self.broken or "the connections were aborted"
        self.close()
        self.process.strand.poke()

    def close(self) -> None:
        """End all connections."""
        if not self._closed:
            self._closed = True
            for pipe in self._pipes.values():
                pipe.send(None)

    def _fail(self, why: str) -> None:
        self.broken = self.broken or why
