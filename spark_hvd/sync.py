"""Starting alike: parameters and optimizer state of one rank for all, at the start or after loading a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spark_hvd.communicator import Communicator
from spark_hvd.context import current
from spark_hvd.errors import MismatchError
from spark_hvd.fusion import batches, flatten, unflatten_into
from spark_hvd.objects import allgather_object, broadcast_object
from spark_hvd.shapes import require_dense, require_root

Description = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor."""


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite tensors with those of one rank, in place.

    Args:
        params: ``model.state_dict()`` or another dict of tensors, ``model.named_parameters()``, or a list of tensors or
            of (name, tensor) pairs. A dict's order may differ between ranks.
        root_rank: Whose values everyone gets.

    Raises:
        NotInitializedError: Before init().
        ValueError: `params` is something else, or `root_rank` is no rank.
        MismatchError: A tensor's name, dtype or shape differs between ranks. Raised on every rank, and no tensor has
            changed.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_root(root_rank, communicator.size)
    named = _named(params)
    description = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in named]
    _require_same(communicator, description, root_rank)
    _broadcast_all(communicator, [tensor for _, tensor in named], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Give every rank's optimizer the state and the hyper-parameters of one rank's.

    The others load the root's ``state_dict()``; no step is taken and no weight changes. Works for optimizers that have
    not made a step yet as well.

    Args:
        optimizer: Any torch optimizer, of the same parameters on every rank.
        root_rank: Whose state everyone gets.
        model: Accepted for Horovod's sake; not needed.

    Raises:
        NotInitializedError: Before init().
        ValueError: `optimizer` is none, `root_rank` is no rank, or a state tensor of the root cannot be sent.
        MismatchError: The optimizers' parameter groups differ in number or size. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_root(root_rank, communicator.size)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if communicator.size == 1:
        return
    groups = allgather_object([len(group["params"]) for group in optimizer.param_groups])
    for rank, sizes in enumerate(groups):
        if sizes != groups[root_rank]:
            raise MismatchError(
                f"broadcast_optimizer_state: the optimizer of rank {rank} has parameter groups of {sizes} parameters, "
                f"that of rank {root_rank} of {groups[root_rank]}; build it alike on every rank."
            )
    tensors: list[torch.Tensor] = []
    skeleton: Any = None
    fault: str | None = None
    if communicator.rank == root_rank:
        try:
            skeleton = _skeleton(optimizer.state_dict(), tensors)
        except TypeError as error:
            fault = str(error)
    skeleton, fault = broadcast_object((skeleton, fault), root_rank)
    if fault is not None:
        raise ValueError(
            f"broadcast_optimizer_state: rank {root_rank} has optimizer state that cannot be sent: {fault}"
        )
    if communicator.rank != root_rank:
        skeleton = _fleshed_out(skeleton, tensors)
    _broadcast_all(communicator, tensors, root_rank)
    if communicator.rank != root_rank:
        optimizer.load_state_dict(skeleton)


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    wanted = "a dict of tensors (model.state_dict()), model.named_parameters(), or a list of tensors or (name, tensor)"
    if isinstance(params, Mapping):
        named = sorted(((str(key), value) for key, value in params.items()), key=lambda pair: pair[0])
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor, torch.nn.Module)):
        named = [
            item if isinstance(item, tuple) and len(item) == 2 else (f"number {place}", item)
            for place, item in enumerate(params)
        ]
    else:
        raise ValueError(f"params must be {wanted}, got {type(params).__name__}.")
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"params has {type(tensor).__name__} under {name!r}; expected {wanted}. Other objects go by "
                "broadcast_object."
            )
        require_dense(tensor)
    return named


def _require_same(communicator: Communicator, description: Description, root_rank: int) -> None:
    digest = hashlib.sha256(json.dumps(description).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=communicator.fact_device)
    digests = communicator.allgather(mine).wait().view(communicator.size, -1)
    if bool((digests == digests[0]).all()):
        return
    everyones = allgather_object(description)
    wanted = everyones[root_rank]
    for rank, other in enumerate(everyones):
        if other != wanted:
            raise MismatchError(
                f"broadcast_parameters: {_difference(wanted, other, root_rank, rank)}. "
                "Build the same model on every rank."
            )


def _difference(wanted: Description, other: Description, root_rank: int, rank: int) -> str:
    theirs = {name: (dtype, shape) for name, dtype, shape in other}
    for name, dtype, shape in wanted:
        if name not in theirs:
            return f"{name!r} of rank {root_rank} is missing on rank {rank}"
        if theirs[name] != (dtype, shape):
            return (
                f"{name!r} is {dtype} of shape {tuple(shape)} on rank {root_rank}, but {theirs[name][0]} of shape "
                f"{tuple(theirs[name][1])} on rank {rank}"
            )
    known = {name for name, _, _ in wanted}
    extra = [name for name, _, _ in other if name not in known]
    if extra:
        return f"{extra[0]!r} of rank {rank} is missing on rank {root_rank}"
    return f"the parameters of rank {rank} come in another order than those of rank {root_rank}"


def _broadcast_all(communicator: Communicator, tensors: list[torch.Tensor], root_rank: int) -> None:
    for members in batches(tensors):
        batch = [tensors[index] for index in members]
        if len(batch) == 1:
            communicator.broadcast(batch[0], root_rank).wait()
            continue
        flat = flatten(batch)
        communicator.broadcast(flat, root_rank).wait()
        if communicator.rank != root_rank:
            unflatten_into(flat, batch)


@dataclass(frozen=True, slots=True)
class _Bone:
    """Stands for a tensor in a skeleton."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


def _skeleton(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with bones in place of tensors, which are collected in `tensors` in the order met."""
    if isinstance(value, torch.Tensor):
        require_dense(value)
        tensors.append(value)
        return _Bone(value.dtype, tuple(value.shape), value.device.type)
    return _mapped(value, lambda item: _skeleton(item, tensors))


def _fleshed_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with empty tensors in place of bones, collected in the same order."""
    if isinstance(value, _Bone):
        device = torch.device("cuda", torch.cuda.current_device()) if value.device == "cuda" else value.device
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
        return tensors[-1]
    return _mapped(value, lambda item: _fleshed_out(item, tensors))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value
