"""LocalSGD and DiLoCo: torch optimizers whose steps are local, with an exchange between the ranks now and then."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.basics import size
from spark_hvd.context.global_state import in_world, ordinal
from spark_hvd.context.local import is_local
from spark_hvd.elastic.run import WorldHook, register_world_hook
from spark_hvd.torch.optimizer.arguments import group_indices
from spark_hvd.torch.optimizer.live import DistributedOptimizerBase, check_kind, make_distributed, require_known
from spark_hvd.torch.outer.compressors import RowCompressor
from spark_hvd.torch.outer.fragment import OuterSettings
from spark_hvd.torch.outer.loop import OuterLoop
from spark_hvd.world import launcher as elastic_launcher

Model = torch.nn.Module | Iterable[torch.nn.Parameter]
Fragments = int | Sequence[Sequence[torch.nn.Parameter]]

_KEY = "outer"
"""Key in a state dict for what torch's optimizers do not know."""
_live: weakref.WeakSet[OuterLoop] = weakref.WeakSet()
"""The loops of this process."""


class OuterOptimizer(DistributedOptimizerBase):
    """Methods that LocalSGD and DiLoCo add to their optimizer."""

    __module__ = "spark_hvd.torch"

    made_by = "LocalSGD or DiLoCo"
    _loop: OuterLoop

    @property
    def local_steps(self) -> int:
        """This rank's steps since the last exchange of each parameter; 0 if all ranks have the same parameters.

        With fragments, it is that of the least recently exchanged one.
        """
        return self._loop.steps

    @property
    def rounds(self) -> int:
        """Number of exchanges that were applied; equal on all ranks that have not joined."""
        return self._loop.count

    @property
    def outer_optimizer(self) -> torch.optim.Optimizer | None:
        """DiLoCo's outer optimizer, for its learning rate; None with LocalSGD."""
        return self._loop.outer

    def synchronize(self) -> None:
        """Make the parameters equal on all ranks. Collective: call it before parameters are evaluated or saved.

        It finishes an exchange in flight, then exchanges what ranks have trained since, and compression errors;
        int8, int4 and top-k are not used for that. It does nothing if all are equal and nothing is left to send. Ranks
        may have made different numbers of steps in their last round; each counts the same. If some made more rounds
        than others, all ranks must have called hvd.join(): those with fewer rounds take over the parameters and buffers
        of those with the most.

        Raises:
            NotInitializedError: Outside a world.
            PlanMismatchError: Parameters or settings differ between ranks.
            StalledError: A rank is in an exchange that this rank has not reached, and has not called hvd.join().
            CollectiveError: A peer or the network failed.
        """
        self._loop.synchronize()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: this is not supported.

        Raises:
            RuntimeError: Always.
        """
        if hasattr(self, "_loop"):
            raise RuntimeError(
                "add_param_group() after hvd.LocalSGD or hvd.DiLoCo: the exchanges are laid out for the parameters "
                "that existed then. Add groups to the optimizer before you wrap it."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer.state_dict.

        It also has the state of the exchanges, under ``"outer"``: the parameters of the last one, the outer optimizer,
        and compression errors. If you call :meth:`synchronize` first, one rank's state serves all.
        """
        return {**super().state_dict(), _KEY: self._loop.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer.load_state_dict. Call it on every rank, and load the model's state too.

        Raises:
            ValueError: The state is of another kind of optimizer, or belongs to other parameters.
        """
        if _KEY not in state_dict:
            raise ValueError(
                f"the state dict has {', '.join(map(repr, state_dict))}, but lacks {_KEY!r}: it was saved by an "
                "optimizer without hvd.LocalSGD or hvd.DiLoCo. Load it before you wrap the optimizer."
            )
        self._loop.check_state(state_dict[_KEY])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        self._loop.load_state_dict(state_dict[_KEY])


def LocalSGD(
    model: Model,
    optimizer: torch.optim.Optimizer,
    sync_every: int,
    *,
    compression: Any = Compression.none,
    overlap: int = 0,
    alpha: float | None = None,
    fragments: Fragments = 1,
    average_buffers: bool = True,
    process_set: ProcessSet = global_process_set,
) -> OuterOptimizer:
    """Let each rank train alone, and average the parameters over all ranks every `sync_every` steps.

    As in Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019). Every rank must call it, but it does
    not wait for other ranks. Ranks must have the same weights at the first step: call hvd.broadcast_parameters before.

    It returns the same object. The object's class keeps its name and gains the methods of OuterOptimizer, so learning
    rate schedulers and other holders of the optimizer keep working.

    Args:
        model: A module, or its parameters. Must include all parameters of the optimizer.
        optimizer: Any torch optimizer except a DistributedOptimizer, which exchanges gradients in each step. Its own
            state, such as Adam's moments, stays each rank's.
        sync_every: Steps per round.
        compression: Compression of the exchanged changes of the parameters: `Compression.none`, `.fp16`, `.bf16`, an
            `Int8Compressor`, an `Int4Compressor` or a `TopKCompressor`.
        overlap: Steps that each rank continues alone while an exchange is in flight. Their changes go into the next
            exchange. 0: wait for the exchange.
        alpha: With `overlap`, the parameters from which a rank continues when an exchange ends: this share of its own
            ones, from 0 to below 1, and 1 - alpha of the common ones. None: the common ones plus all that the rank has
            changed since the exchange began.
        fragments: Number of parts of about equal size, each of whole parameters, into which to divide the parameters;
            there are fewer if one parameter is larger than such a part. Or a list of the parameters of each;
            parameters in no list form another, and parameters that the optimizer does not have are ignored. Each part
            is exchanged every `sync_every` steps, one after the other at equal intervals. 1: all at once. At most
            `sync_every`.
        average_buffers: Also average the floating-point buffers of a module, such as those of batch norm.
        process_set: The ranks to average over; on other ranks the optimizer stays local. Elastic ranks outside their
            worlds must pass the global process set.

    Raises:
        TypeError: `model` or `optimizer` is of another kind, or a parameter is not floating point.
        ValueError: Another argument is wrong.
    """
    settings = OuterSettings("LocalSGD", sync_every, overlap, alpha, compression, process_set)
    return _make_distributed(settings, model, optimizer, None, fragments, average_buffers)


def DiLoCo(
    model: Model,
    inner_optimizer: torch.optim.Optimizer,
    sync_every: int,
    *,
    outer_optimizer: torch.optim.Optimizer | None = None,
    compression: Any = Compression.none,
    overlap: int = 0,
    alpha: float | None = None,
    fragments: Fragments = 1,
    average_buffers: bool = True,
    process_set: ProcessSet = global_process_set,
) -> OuterOptimizer:
    """Let each rank train alone, and make an outer step from the last common parameters every `sync_every` steps.

    As in Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023): the negated mean
    change of the ranks' parameters is the gradient of an outer optimizer. Everything else is as with :func:`LocalSGD`,
    which equals an outer step of rate 1. With `overlap` the outer step is made late, as in Douillard et al., "Streaming
    DiLoCo with overlapping communication" (2025).

    Args:
        model: See :func:`LocalSGD`.
        inner_optimizer: See :func:`LocalSGD`, `optimizer`.
        sync_every: Steps per round.
        outer_optimizer: An optimizer of the same parameters. Its groups are then given other tensors of the same shapes
            to step on. None: SGD with a learning rate of 0.7 and a Nesterov momentum of 0.9, as in the paper.
        compression: See :func:`LocalSGD`.
        overlap: See :func:`LocalSGD`.
        alpha: See :func:`LocalSGD`.
        fragments: See :func:`LocalSGD`. The outer optimizer steps on the parameters of one at a time.
        average_buffers: See :func:`LocalSGD`.
        process_set: See :func:`LocalSGD`.

    Raises:
        TypeError: `model` or an optimizer is of another kind, or a parameter is not floating point.
        ValueError: Another argument is wrong.
    """
    check_kind(inner_optimizer)
    if outer_optimizer is None:
        params = _shared(inner_optimizer)
        outer_optimizer = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True) if params else None
    elif not isinstance(outer_optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"outer_optimizer={outer_optimizer!r}: expected a torch optimizer for the parameters of the inner one, "
            "such as torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), or None for it"
        )
    settings = OuterSettings("DiLoCo", sync_every, overlap, alpha, compression, process_set)
    return _make_distributed(settings, model, inner_optimizer, outer_optimizer, fragments, average_buffers)


def _make_distributed(
    settings: OuterSettings,
    model: Model,
    optimizer: torch.optim.Optimizer,
    outer: torch.optim.Optimizer | None,
    fragments: Fragments,
    average_buffers: bool,
) -> OuterOptimizer:
    check_kind(optimizer)
    _check_options(settings)
    kind, compression, process_set = settings.kind, settings.compression, settings.process_set
    if isinstance(compression, type) and issubclass(compression, RowCompressor):
        compression = compression()
    if elastic_launcher.installed() is not None and not in_world() and process_set is not global_process_set:
        raise ValueError(
            f"process_set={process_set}: process sets end with the world, but an elastic rank moves from world to "
            "world; make this optimizer inside the function that is decorated with hvd.elastic.run."
        )
    names = _names(kind, model)
    params = _shared(optimizer)
    _check_params(kind, params, names)
    averaged = model if average_buffers and isinstance(model, torch.nn.Module) else torch.nn.Module()

    def buffers() -> list[torch.Tensor]:
        return [buffer for buffer in averaged.buffers() if buffer.is_floating_point()]

    parts = _divided(fragments, params, names, settings.sync_every)
    settings = replace(settings, compression=compression, name=f"{kind}.{ordinal('outer')}")
    loop = OuterLoop(settings, [names[id(param)] for param in params], params, parts, buffers, outer)
    if outer is not None:
        _retarget(outer, {id(param): anchor for param, anchor in zip(params, loop.anchors, strict=True)})
    _live.add(loop)
    optimizer = make_distributed(optimizer, OuterOptimizer)
    optimizer._loop = loop
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(lambda own, args, kwargs: loop.after_step())
    return optimizer


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, OuterOptimizer)
    if in_world() and size() > 1:
        require_known(optimizer)
    optimizer._loop.before_step()


def _check_options(settings: OuterSettings) -> None:
    every, overlap, alpha, compression = settings.sync_every, settings.overlap, settings.alpha, settings.compression
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"sync_every={every!r}: expected a number of steps, 1 or more, such as 20")
    if not isinstance(overlap, int) or isinstance(overlap, bool) or not 0 <= overlap < every:
        raise ValueError(
            f"overlap={overlap!r}: expected a number of steps from 0 to {every - 1}, as sync_every={every}: an "
            "exchange ends before the next begins"
        )
    if alpha is not None and (
        isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < 1 or not overlap
    ):
        raise ValueError(
            f"alpha={alpha!r} with overlap={overlap}: expected the share of the rank's own parameters, 0 to below 1, "
            "such as 0.5, and an overlap of 1 or more"
        )
    if not isinstance(compression, RowCompressor) and not all(
        callable(getattr(compression, method, None)) for method in ("compress", "decompress")
    ):
        raise ValueError(
            f"compression={compression!r}: expected hvd.Compression.none, .fp16 or .bf16, hvd.Int8Compressor(), "
            "hvd.Int4Compressor() or hvd.TopKCompressor(ratio)"
        )


def _divided(
    fragments: Fragments, params: Sequence[torch.nn.Parameter], names: dict[int, str], sync_every: int
) -> list[list[int]]:
    """Return the places of each fragment's parameters in `params`. The model's others, in `names`, are left out."""
    if isinstance(fragments, (list, tuple)):
        others = names.keys() - {id(param) for param in params}
        groups = group_indices(
            [
                [param for param in group if id(param) not in others] if isinstance(group, (list, tuple)) else group
                for group in fragments
            ],
            params,
            "fragments",
        )
        left = sorted(set(range(len(params))).difference(*groups))
        groups = [group for group in (*groups, left) if group] if any(groups) else []
    elif isinstance(fragments, int) and not isinstance(fragments, bool) and fragments > 0:
        total, before = 1 + sum(param.numel() for param in params), 0.0
        places: dict[int, list[int]] = {}
        for index, param in enumerate(params):
            places.setdefault(int((before + param.numel() / 2) * fragments / total), []).append(index)
            before += param.numel()
        groups = list(places.values())
    else:
        groups = []
    if not groups:
        raise ValueError(
            f"fragments={fragments!r}: expected how many, 1 or more, or a list of the parameters of each that the "
            "optimizer trains"
        )
    if len(groups) > sync_every:
        raise ValueError(
            f"fragments: {len(groups)} of them with sync_every={sync_every}; expected {sync_every} at most, as one is "
            "exchanged after the other"
        )
    return groups


def _check_params(kind: str, params: list[torch.nn.Parameter], names: dict[int, str]) -> None:
    if not params:
        raise ValueError(f"{kind}: the optimizer has no parameters that ranks share; expected at least one")
    unknown = sum(id(param) not in names for param in params)
    if unknown:
        raise ValueError(
            f"{kind}: {unknown} of the optimizer's {len(params)} parameters do not belong to the model: pass the model "
            "that the optimizer was made for"
        )
    for param in params:
        if not param.is_floating_point():
            raise TypeError(
                f"{kind}: {names[id(param)]!r} is {param.dtype}; expected floating-point numbers. Train it with an "
                "optimizer of its own, such as hvd.DistributedOptimizer"
            )


def _shared(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that ranks share."""
    return [param for group in optimizer.param_groups for param in group["params"] if not is_local(param)]


def _names(kind: str, model: Model) -> dict[int, str]:
    if isinstance(model, torch.nn.Module):
        return {id(param): name for name, param in model.named_parameters()}
    params = list(model) if isinstance(model, Iterable) and not isinstance(model, torch.Tensor) else [None]
    if not all(isinstance(param, torch.nn.Parameter) for param in params):
        raise TypeError(
            f"{kind}: model is {type(model).__name__}; expected a torch.nn.Module or its parameters, model.parameters()"
        )
    return {id(param): f"param{number}" for number, param in enumerate(params)}


def _retarget(outer: torch.optim.Optimizer, anchors: dict[int, torch.nn.Parameter]) -> None:
    """Make the outer optimizer step on the anchors."""
    given = _shared(outer)
    if {id(param) for param in given} != anchors.keys():
        raise ValueError(
            f"outer_optimizer has {len(given)} parameters, the inner one has {len(anchors)}; expected the same ones: "
            "make both for the same model.parameters()"
        )
    for group in outer.param_groups:
        group["params"] = [anchors[id(param)] for param in group["params"] if id(param) in anchors]
    for param in given:
        if param in outer.state:
            outer.state[anchors[id(param)]] = outer.state.pop(param)


def _leave_world() -> None:
    for loop in list(_live):
        loop.leave_world()


register_world_hook(WorldHook(lambda: None, _leave_world))
