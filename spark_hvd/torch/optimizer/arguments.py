"""Checks DistributedOptimizer's arguments, and the weights that ranks start from."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import spark_hvd
from spark_hvd.context.local import is_local, mark_local
from spark_hvd.torch.optimizer.buckets import ParamSpec, split_evenly

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_048_573


def check_passes(passes: int) -> None:
    """Raise a ValueError unless this is a valid number of backward passes."""
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes}: must be 1 or more")


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[str]:
    """Return the parameters' names in the optimizer's order; ValueError if `named_parameters` does not provide them."""
    if named_parameters is None:
        return [
            f"group{number}.param{i}"
            for number, group in enumerate(optimizer.param_groups)
            for i in range(len(group["params"]))
        ]
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters must be a sequence of (name, parameter) tuples: pass model.named_parameters()"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"names in named_parameters must be unique, found more than once: {', '.join(twice)}. With several models, "
            f"put a prefix before the names of each"
        )
    name_of = {id(param): name for name, param in pairs}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unnamed = sum(id(param) not in name_of for param in params)
    if unnamed:
        raise ValueError(
            f"named_parameters must cover all {len(params)} parameters of the optimizer, but lacks {unnamed} of them: "
            f"pass model.named_parameters() of the model that the optimizer was made for"
        )
    return [name_of[id(param)] for param in params]


def spec_of(name: str, param: torch.Tensor) -> ParamSpec:
    """Return what ranks compare about a parameter."""
    return ParamSpec(
        name, tuple(param.shape), tuple(param.stride()), param.dtype, str(param.device), param.requires_grad
    )


def placement(params: Sequence[torch.Tensor]) -> str:
    """Describe which parameters share a device: ranks that divide them differently would have unequal buckets."""
    number_of: dict[torch.device, int] = {}
    numbers = [number_of.setdefault(param.device, len(number_of)) for param in params]
    if len(number_of) < 2:
        return "one device"
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return ", then ".join(f"{count} on device {number}" for number, count in runs)


def group_indices(
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None,
    params: Sequence[torch.nn.Parameter],
    name: str = "groups",
) -> list[list[int]]:
    """Return the indices of each group's parameters; raise a ValueError, with the argument's name, if it is invalid."""
    if groups is None or isinstance(groups, int):
        if groups is not None and groups < 0:
            raise ValueError(f"{name}={groups}: must be 0 or more, or lists of parameters")
        return split_evenly(range(len(params)), groups or 0)
    index_of = {id(param): index for index, param in enumerate(params)}
    result: list[list[int]] = []
    placed: set[int] = set()
    for number, group in enumerate(groups):
        if not isinstance(group, (list, tuple)) or not all(isinstance(param, torch.Tensor) for param in group):
            raise ValueError(
                f"{name} must be a number or lists of parameters; entry {number} is {type(group).__name__}"
            )
        members = [index_of.get(id(param), -1) for param in group]
        if -1 in members:
            raise ValueError(
                f"{name}[{number}] has a tensor at place {members.index(-1)} that is not a parameter of the optimizer"
            )
        if len(set(members)) < len(members) or placed & set(members):
            raise ValueError(f"{name}[{number}] has a parameter that is already in a group: each may be in one only")
        placed.update(members)
        result.append(members)
    return result


def mark_chosen(params: Sequence[torch.nn.Parameter], local: Iterable[torch.nn.Parameter]) -> None:
    """Make some of the optimizer's parameters rank-local; raise a ValueError if one is not in `params`."""
    own = set(map(id, params))
    for number, param in enumerate(chosen := list(local)):
        if id(param) not in own:
            raise ValueError(
                f"local_parameters[{number}] is {type(param).__name__}, not a parameter of the optimizer: pass "
                "parameters that the optimizer was made for, such as model.embedding.weight"
            )
    for param in chosen:
        if not is_local(param):
            mark_local(param)


def exchange_device(group: dist.ProcessGroup, params: Sequence[torch.nn.Parameter]) -> torch.device:
    """Return a device on which small facts can be sent over `group`."""
    on_cpu = "cpu" in str(dist.get_backend_config(group))
    return torch.device("cpu") if on_cpu else params[0].device


def chosen_groups(
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None, num_groups: int
) -> int | Sequence[Sequence[torch.nn.Parameter]] | None:
    """Return `groups`, or the value of Horovod's former `num_groups`."""
    if num_groups:
        warnings.warn("num_groups= is deprecated; pass groups= instead.", DeprecationWarning, stacklevel=3)
        return groups if groups is not None else num_groups
    return groups


def fingerprints(params: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for the bits of each tensor; different tensors nearly always have different numbers."""
    if not params:
        return []
    with torch.no_grad():
        return torch.stack([_fingerprint(param).cpu() for param in params]).tolist()


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(_INTEGERS[real.element_size()])
    return bits.sum(dtype=torch.int64) % _PRIME  # modulo a prime, so that the high bits count, too


def warn_about_start(
    params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec], weights: Sequence[list[int]]
) -> None:
    """Warn if ranks start from different weights, or if DistributedDataParallel reduces the same gradients."""
    different = [spec.name for spec, *numbers in zip(specs, *weights, strict=True) if len(set(numbers)) > 1]
    if different:
        warnings.warn(
            f"ranks start from different weights: {len(different)} of {len(specs)} parameters differ, such as "
            f"{different[0]!r}. Equal gradients never bring them together. Before the first step, and when one rank "
            "loads a checkpoint, call hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
            stacklevel=_level_of_caller(),
        )
    mine = set(map(id, params))
    # By type: isinstance() makes proxies load their objects, and issubclass() of this abstract class takes three times
    # as long. There are 300,000 objects once torch is loaded.
    wrapped = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
    if any(id(param) in mine for each in wrapped for param in each.parameters()):
        warnings.warn(
            "gradients are reduced twice, by DistributedDataParallel and by DistributedOptimizer: use only one",
            stacklevel=_level_of_caller(),
        )


def _level_of_caller() -> int:
    """Return the ``stacklevel`` with which a warning of the calling function names a line of the user's program."""
    folders = (os.path.dirname(file) + os.sep for file in (spark_hvd.__file__, torch.__file__))
    below = (*folders, contextlib.__file__)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(below):
        level, frame = level + 1, frame.f_back
    return level
