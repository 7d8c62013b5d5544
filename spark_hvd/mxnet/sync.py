"""Gives all ranks one rank's parameters at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from spark_hvd.collectives.process_set import global_process_set
from spark_hvd.context.basics import rank
from spark_hvd.mxnet.arrays import overwrite, require_arrays, to_torch
from spark_hvd.mxnet.collectives import broadcasts


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters with those of one rank, all in one exchange.

    A parameter whose shape is not known yet is exchanged once it is: in the first forward pass, which all ranks must
    then make.

    Args:
        params: ``Block.collect_params()``, or another dict of parameters or arrays by name, whose order may differ
            between ranks; also the dicts of ``Module.get_params()``.
        root_rank: The rank whose values all ranks get.
        prefix: Prefix of the name by which ranks match the call.

    Raises:
        NotInitializedError: Before init().
        ValueError: `params` is something else, or `root_rank` is not a rank.
        MismatchError: Parameters, dtypes or shapes differ between ranks. Raised on every rank; nothing has changed.
        CollectiveError: A peer or the network failed.
    """
    if not isinstance(params, (dict, ParameterDict)):
        raise ValueError(f"params must be a dict of parameters or arrays, got {type(params).__name__}.")
    name = f"{prefix or ''}broadcast_parameters"
    arrays: list[Any] = []
    for key, value in sorted(params.items()):
        try:
            arrays += value.list_data() if isinstance(value, Parameter) else [value]
        except DeferredInitializationError:
            _follow(value, root_rank, f"{name}.{key}")
    _broadcast(arrays, root_rank, name)


def _follow(parameter: Any, root_rank: int, name: str) -> None:
    """Broadcast a parameter as soon as it has a shape."""

    def initialize(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # restores the class's method
        parameter._init_impl(*args, **kwargs)
        _broadcast(parameter.list_data(), root_rank, name)

    parameter._init_impl = initialize


def _broadcast(arrays: Sequence[Any], root_rank: int, name: str) -> None:
    global_process_set.require_root(root_rank)
    require_arrays(arrays)
    if not arrays:
        return
    given = [to_torch(array) for array in arrays]
    results = broadcasts(given, root_rank, name, global_process_set, in_place=False)
    if rank() != root_rank:
        for array, result in zip(arrays, results, strict=True):
            overwrite(array, result)
