"""Gives all ranks one rank's parameters and optimizer state, at the start or after loading a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.context.global_state import current, speaks_horovod
from spark_hvd.context.local import is_local, shares_local
from spark_hvd.elastic.skeleton import broadcast_all
from spark_hvd.elastic.sync import broadcast_content
from spark_hvd.transport.communicator import Communicator
from spark_hvd.transport.shapes import require_dense, require_places, require_root
from spark_hvd.world.errors import MismatchError

Description = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor."""


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite tensors with those of one rank, in place; rank-local parameters are unchanged.

    Args:
        params: ``model.state_dict()`` or another dict of tensors, ``model.named_parameters()``, or a list of tensors or
            of (name, tensor) pairs. A dict's order may differ between ranks.
        root_rank: The rank whose values all ranks get.

    Raises:
        NotInitializedError: Before init().
        ValueError: `params` is something else, elements of a tensor share memory, or there is no rank `root_rank`.
        MismatchError: A tensor's name, dtype or shape differs between ranks. Raised on every rank; no tensor has
            changed.
        CollectiveError: A peer or the network failed.
    """
    communicator = current().communicator
    require_root(root_rank, communicator.size)
    tensors = _named(params)
    local = shares_local([tensor for _, tensor in tensors])
    named = [pair for pair, own in zip(tensors, local, strict=True) if not own]
    description = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in named]
    _require_same(communicator, description, root_rank)
    broadcast_all(communicator, [tensor for _, tensor in named], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Give every rank's optimizer the state and hyper-parameters of one rank's optimizer.

    The others load the root's ``state_dict()``. No step is taken and no weight changes. The optimizer need not have
    made a step. The state of rank-local parameters stays each rank's own.

    Args:
        optimizer: Any torch optimizer, with the same parameters on every rank.
        root_rank: The rank whose state all ranks get.
        model: Accepted for Horovod's sake; not needed.

    Raises:
        NotInitializedError: Before init().
        ValueError: `optimizer` is not an optimizer, there is no rank `root_rank`, or a state tensor of the root cannot
            be sent.
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
                f"that of rank {root_rank} of {groups[root_rank]}; build the same optimizer on every rank."
            )
    mine = optimizer.state_dict()
    numbers = [number for group in mine["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    local = {number for number, param in zip(numbers, params, strict=True) if is_local(param)}
    own = {number: state for number, state in mine["state"].items() if number in local}
    content = {"optimizer": {**mine, "state": {n: state for n, state in mine["state"].items() if n not in local}}}
    received = broadcast_content(communicator, content, root_rank, "broadcast_optimizer_state")
    if communicator.rank != root_rank:
        state = received["optimizer"]
        load_optimizer_state(optimizer, {**state, "state": {**state["state"], **own}})
    if speaks_horovod() and not received["optimizer"]["state"]:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # as a step on a fresh optimizer leaves it


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a ``state_dict()`` without changing dtypes.

    torch casts state tensors to their parameter's dtype, and so loses state that is kept in higher precision. Tensors
    of ``state`` may become the optimizer's own.
    """
    optimizer.load_state_dict(state)
    if not {"state", "param_groups"} <= state.keys():
        return  # an optimizer with a layout of its own
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for key, value in state["state"].get(number, {}).items():
            optimizer.state[param][key] = _restored(optimizer.state[param][key], value)


def _restored(loaded: Any, value: Any) -> Any:
    """Undo torch's changes to a loaded state value: to its dtype, and to text."""
    if isinstance(value, str):
        return value  # torch takes text for a collection, and makes "<generator object ...>" of it
    if isinstance(value, torch.Tensor):
        return loaded if loaded.dtype == value.dtype else value.to(loaded.device)
    if isinstance(value, dict):
        return {key: _restored(loaded[key], part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restored(*pair) for pair in zip(loaded, value, strict=True))
    return loaded


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
                f"params has {type(tensor).__name__} under {name!r}; expected {wanted}. Use broadcast_object "
                "for other objects."
            )
        require_dense(tensor)
    require_places(tensor for _, tensor in named if not is_local(tensor))
    return named


def _require_same(communicator: Communicator, description: Description, root_rank: int) -> None:
    digest = hashlib.sha256(json.dumps(description).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=communicator.fact_device)
    digests = communicator.allgather(mine, [len(digest)] * communicator.size).wait().view(communicator.size, -1)
    if bool((digests == digests[0]).all()):
        return
    gathered = allgather_object(description)
    wanted = gathered[root_rank]
    for rank, other in enumerate(gathered):
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
    return f"the parameters of rank {rank} are in a different order from those of rank {root_rank}"
