"""Looks up rows of sharded tables: ids go to the ranks that have the rows, rows come back, and gradients likewise.

This takes two exchanges forward (ids, rows) and one backward, however many tables are looked up together. Each row is
sent once to each rank that wants it, and so is its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from spark_hvd.context.global_state import Context, current
from spark_hvd.elastic.run import WorldHook, register_world_hook
from spark_hvd.torch.embedding.routes import Route, by_rank, by_table, plan, strides
from spark_hvd.transport.distributed import TorchCommunicator
from spark_hvd.world.errors import CollectiveError

if TYPE_CHECKING:
    from spark_hvd.torch.embedding.table import ShardedEmbedding

_FAULT = -1
_rooms: weakref.WeakKeyDictionary[ShardedEmbedding, int] = weakref.WeakKeyDictionary()
"""How many ids the next message has room for; the same on all ranks. The key is the first table of a look-up."""
_opened: tuple[Context, TorchCommunicator] | None = None


def look_up(tables: Sequence[ShardedEmbedding], ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Look up rows of several tables in one exchange; collective: every rank looks up the same tables.

    Args:
        tables: Tables of one dtype, on one device.
        ids: Ids for each table; int64 or int32, of any shape. A rank that needs none passes a tensor without elements,
            but must then take part in the backward pass, too.

    Returns:
        The rows of each table, of shape (each dimension of the ids, dim).

    Raises:
        IndexError: An id is beyond its table.
        TypeError: Ids are not integers.
        ValueError: Tables differ in dtype or device, or were divided among another number of ranks.
        CollectiveError: A peer or the network failed, or looks up an id beyond a table.
    """
    return look_up_async(tables, ids).wait()


def look_up_async(tables: Sequence[ShardedEmbedding], ids: Sequence[torch.Tensor]) -> LookUp:
    """Start a :func:`look_up`: send the ids. wait() reads the rows, including the effect of optimizer steps until then.

    Start the next batch's look-up before this batch's backward pass, so that its ids are sent meanwhile.
    """
    return LookUp(tables, ids)


class LookUp:
    """A look-up that has begun; ``wait()`` returns its rows."""

    __module__: str = "spark_hvd.torch"

    def __init__(self, tables: Sequence[ShardedEmbedding], ids: Sequence[torch.Tensor]) -> None:
        self._tables = list(tables)
        _require_alike(self._tables, ids)
        self._ids = [each.long() for each in ids]
        self._size = self._tables[0].cut.size
        fault = next((text for pair in zip(tables, self._ids, strict=True) if (text := _beyond(*pair))), None)
        if self._size > 1:
            self._request(fault)
        if fault is not None:
            raise IndexError(fault)

    def _request(self, fault: str | None) -> None:
        """Send each rank a message of fixed length: how many rows of each table, the maximum for any rank, and rows.

        So ranks learn the maximum that any rank requests from any other, which is the room for rows in the next
        message. Rows that do not fit into this message need a second one, from all ranks.
        """
        self._communicator = _open()
        size, count, room = self._size, len(self._tables), _rooms.get(self._tables[0], 0)
        kind = torch.int32 if sum(table.rows for table in self._tables) < 2**31 else torch.int64
        message = torch.zeros(size, count + 1 + room, dtype=kind, device=self._ids[0].device)
        if fault is None:
            self._route = plan(self._ids, [table.rows for table in self._tables], size)
            totals = [sum(each) for each in self._route.counts]
            header = [[*each, max(totals)] for each in self._route.counts]
            wanted = self._route.wanted.to(kind).split(totals)  # type: ignore[no-untyped-call]
            for row, mine in zip(message, wanted, strict=True):
                row[count + 1 : count + 1 + len(mine)] = mine[:room]
            self._rest = [each[room:] for each in wanted]
        else:
            header = [[_FAULT] * count + [0]] * size  # tells the others, which would otherwise wait
        message[:, : count + 1] = torch.tensor(header, dtype=kind, device="cpu")
        each = [message.shape[1]] * size
        self._room, self._told = room, self._communicator.alltoall(message.view(-1), each, each)
        if fault is not None:
            self._receive()

    def _receive(self) -> tuple[torch.Tensor, list[list[int]], int]:
        """Return the messages, each rank's number of wanted rows per table, and the maximum between any two ranks."""
        messages = self._told.wait().view(self._size, -1)
        header = messages[:, : len(self._tables) + 1].tolist()
        most = max(each[-1] for each in header)
        if most > self._room or most < self._room // 2:
            _rooms[self._tables[0]] = most + most // 8
        return messages, [each[:-1] for each in header], most

    def _answer(self) -> torch.Tensor:
        """Return the rows that the others request from this rank, rank by rank."""
        messages, self._asked, most = self._receive()
        bad = [rank for rank, counts in enumerate(self._asked) if counts[0] == _FAULT]
        if bad:
            raise CollectiveError(
                f"rank {bad[0]} looks up an id beyond its table, so all look-ups fail; its own error names the id"
            )
        totals, first = [sum(each) for each in self._asked], len(self._tables) + 1
        pieces = [row[first : first + total] for row, total in zip(messages, totals, strict=True)]
        if most > self._room:
            lengths = [max(0, total - self._room) for total in totals]
            rest = self._communicator.alltoall(
                torch.cat(self._rest), [len(each) for each in self._rest], lengths
            ).wait()
            rests = rest.split(lengths)  # type: ignore[no-untyped-call]
            pieces = [each for pair in zip(pieces, rests, strict=True) for each in pair]
        return torch.cat(pieces)

    def wait(self) -> list[torch.Tensor]:
        """Return the rows of each table, of shape (each dimension of the ids, dim); collective; call it once.

        Raises:
            CollectiveError: A peer or the network failed.
        """
        tables = self._tables
        if self._size == 1:
            pairs = zip(tables, self._ids, strict=True)
            return [
                torch.nn.functional.embedding(ids, table.weight, table.padding_idx, sparse=table.sparse)
                for table, ids in pairs
            ]
        starts = strides([table.rows for table in tables], self._size)
        answer = self._answer()
        # for each table, the rows that all ranks request
        local = [
            each.view(-1) - start if start else each.view(-1)
            for each, start in zip(by_table(answer, self._asked, [1] * len(tables)), starts, strict=False)
        ]
        exchange = _Exchange(self._communicator, self._route, self._asked, local, tables)
        rows = _Rows.apply(exchange, *[table.weight for table in tables])  # type: ignore[no-untyped-call]
        return [torch.nn.functional.embedding(place, row) for place, row in zip(self._route.places, rows, strict=True)]


class _Exchange:
    """Sends rows one way and their gradients back."""

    def __init__(
        self,
        communicator: TorchCommunicator,
        route: Route,
        asked: list[list[int]],
        local: list[torch.Tensor],
        tables: Sequence[ShardedEmbedding],
    ) -> None:
        self._communicator = communicator
        self._wanted, self._asked = route.counts, asked
        self._local, self._tables = local, tables
        self._dims = [table.dim for table in tables]

    def rows(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rows that this rank has requested, table by table."""
        given = [weight.index_select(0, ids) for weight, ids in zip(weights, self._local, strict=True)]
        return self._send(given, self._asked, self._wanted)

    def gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of this rank's weights: the means over all ranks, row by row."""
        received = self._send(gradients, self._wanted, self._asked)
        return [
            table.gradient(ids, values.mul_(1.0 / table.cut.size))
            for table, ids, values in zip(self._tables, self._local, received, strict=True)
        ]

    def _send(
        self, matrices: Sequence[torch.Tensor], out: list[list[int]], back: list[list[int]]
    ) -> list[torch.Tensor]:
        sent, received = ([self._elements(rank) for rank in counts] for counts in (out, back))
        flat = self._communicator.alltoall(by_rank(matrices, out), sent, received).wait()
        return by_table(flat, back, self._dims)

    def _elements(self, counts: list[int]) -> int:
        return sum(count * dim for count, dim in zip(counts, self._dims, strict=True))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.rows(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.exchange.gradients(gradients))


def _open() -> TorchCommunicator:
    """Return the look-ups' own connections, as they have no fixed order with other collectives; collective if new."""
    global _opened
    here = current()
    if _opened is None or _opened[0] is not here:
        with here.establishing():
            _opened = here, TorchCommunicator(here.new_group(0))
        _rooms.clear()  # new ranks have no entries
    return _opened[1]


def _release() -> None:
    global _opened
    _opened = None


register_world_hook(WorldHook(lambda: None, _release))


def _require_alike(tables: Sequence[ShardedEmbedding], ids: Sequence[torch.Tensor]) -> None:
    if not tables or len(tables) != len(ids):
        raise ValueError(f"look_up of {len(tables)} tables got ids of {len(ids)}: pass ids for each, and at least one")
    first = tables[0].weight
    for table, given in zip(tables, ids, strict=True):
        table.require_cut_for_here()
        if (table.weight.dtype, table.weight.device) != (first.dtype, first.device):
            raise ValueError(
                f"the table {table.name!r} is {table.weight.dtype} on {table.weight.device}, and {tables[0].name!r} "
                f"{first.dtype} on {first.device}: look up tables of one dtype and device together"
            )
        if given.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"ids of the table {table.name!r} are {given.dtype}: expected int64 or int32, such as ids.long()"
            )


def _beyond(table: ShardedEmbedding, ids: torch.Tensor) -> str | None:
    """Return what is wrong with ids; None if nothing is."""
    if ids.numel() == 0:
        return None
    least, most = (int(each) for each in torch.aminmax(ids))
    if least >= 0 and most < table.rows:
        return None
    return (
        f"the id {least if least < 0 else most} is not in the table {table.name!r}, whose {table.rows:,} rows are 0 to "
        f"{table.rows - 1:,}: make the table larger, or hash the ids as docs/embeddings.md shows"
    )
