"""The state of sharded tables as a whole: gathered from the ranks, and divided among any number of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context.global_state import current
from spark_hvd.torch.embedding.routes import Cut
from spark_hvd.world.errors import MismatchError

_CHUNK = 64 << 20
"""Bytes gathered at once; this bounds the copies in memory."""

_cuts: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_cut(weight: torch.Tensor, cut: Cut, name: str) -> None:
    """Remember how a table is divided."""
    _cuts[weight] = cut, name


def whole_state_dict(
    of: torch.nn.Module | torch.optim.Optimizer, root_rank: int | None = None
) -> dict[str, Any] | None:
    """Return the ``state_dict()`` of a model or optimizer, with whole tables instead of this rank's rows; collective.

    For a model, ``load_state_dict`` loads it on any number of ranks, and each takes its rows; so does an nn.Embedding
    with as many rows. For an optimizer, use :func:`load_whole_state_dict`.

    Args:
        of: The model or the optimizer.
        root_rank: The only rank that gets it, as others may lack the memory. None: all ranks get it.

    Returns:
        Tensors of tables are new ones on the CPU; the others are those of ``state_dict()``. None on ranks that do not
        get it.

    Raises:
        NotInitializedError: Outside a world.
        MismatchError: Optimizers of ranks have state of other tables.
        CollectiveError: A peer or the network failed.
    """
    state: dict[str, Any] = of.state_dict()
    if isinstance(of, torch.nn.Module):
        for name, param in of.named_parameters(remove_duplicate=False):
            if param in _cuts:
                state[name] = _gather(param.detach(), _cuts[param][0], root_rank)
    else:
        state = {**state, "state": dict(state["state"])}
        cuts = {number: _cuts[held][0] for number, held in _numbered(of, state) if held in _cuts}
        for number, keys in _gathered(state["state"], cuts).items():
            state["state"][number] = {
                key: _gather(value, cuts[number], root_rank) if key in keys else value
                for key, value in state["state"][number].items()
            }
    return state if root_rank in (None, current().communicator.rank) else None


def load_whole_state_dict(into: torch.nn.Module | torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of :func:`whole_state_dict` on any number of ranks: each takes its rows; not collective.

    Args:
        into: The model or the optimizer.
        state: The whole state.
    """
    if isinstance(into, torch.nn.Module):
        into.load_state_dict(state)
        return
    parts = dict(state["state"])
    for number, param in _numbered(into, state):
        if param in _cuts and number in parts:
            cut = _cuts[param][0]
            parts[number] = {
                key: cut.take(value) if _of_rows(value, cut.rows) else value for key, value in parts[number].items()
            }
    into.load_state_dict({**state, "state": parts})


def _numbered(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return list(zip(numbers, params, strict=True))


def _gathered(states: Mapping[int, Mapping[str, Any]], cuts: Mapping[int, Cut]) -> dict[int, set[str]]:
    """Return the keys of the state to gather, by the numbers of the tables' weights; collective.

    A tensor may by chance have as many entries as this rank has rows. It belongs to rows if that is so on all ranks.

    Raises:
        MismatchError: Ranks have state for different tables.
    """
    if not cuts:
        return {}
    mine = {
        number: {key for key, value in states[number].items() if _of_rows(value, cut.here)}
        for number, cut in cuts.items()
        if number in states
    }
    for rank, theirs in enumerate(allgather_object(mine)):
        if theirs.keys() != mine.keys():
            raise MismatchError(
                f"whole_state_dict: the optimizer of rank {rank} has state of the parameters {sorted(theirs)} that are "
                f"tables, and this rank's of {sorted(mine)}: every rank steps all of them, or none"
            )
        for number, keys in theirs.items():
            mine[number] = mine[number] & keys
    return mine


def _of_rows(value: Any, rows: int) -> bool:
    """Return whether this has an entry for each row of a table."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows


def _gather(part: torch.Tensor, cut: Cut, root_rank: int | None) -> torch.Tensor:
    """Gather the whole tensor from its parts; empty on ranks that do not get it."""
    communicator = current().communicator
    kept = root_rank in (None, communicator.rank)
    whole = torch.empty(cut.rows if kept else 0, *part.shape[1:], dtype=part.dtype, device="cpu")
    step = max(1, _CHUNK // max(1, part[:1].nbytes * cut.size))
    for start in range(0, cut.rows_of(0), step):
        counts = [max(0, min(step, cut.rows_of(rank) - start)) for rank in range(cut.size)]
        mine = part[start : start + step].contiguous()
        gathered = communicator.allgather(mine, counts).wait() if cut.size > 1 else mine
        if kept:
            for rank, rows in enumerate(torch.split(gathered, counts)):
                first = start * cut.size + rank
                whole[first : first + (len(rows) - 1) * cut.size + 1 : cut.size] = rows.cpu() if len(rows) else rows
    return whole
