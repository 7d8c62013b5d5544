"""DistributedOptimizer: a torch optimizer whose gradients are reduced over all ranks before each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spark_hvd.collectives.compression import Compression, GradientCompressor
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.global_state import in_world, ordinal, speaks_horovod
from spark_hvd.context.join import require_everyone
from spark_hvd.context.local import is_local
from spark_hvd.torch.optimizer.adasum import AdasumOptimizer, make_distributed_with_adasum
from spark_hvd.torch.optimizer.arguments import (
    check_passes,
    chosen_groups,
    group_indices,
    mark_chosen,
    names_of,
    spec_of,
)
from spark_hvd.torch.optimizer.live import (
    NOT_YET,
    DistributedOptimizerBase,
    check_kind,
    make_distributed,
    register_optimizer,
    replace_owners,
    require_bound,
    require_known,
)
from spark_hvd.torch.optimizer.recipe import Recipe
from spark_hvd.torch.optimizer.reducer import GradientReducer
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.world import launcher as elastic_launcher


class ReducedOptimizer(DistributedOptimizerBase):
    """Methods that DistributedOptimizer adds to its optimizer."""

    _reducer: GradientReducer | None
    _recipe: Recipe
    _synchronizes: bool
    _spans_worlds: bool
    """Whether it was made outside the worlds of an elastic rank, and is bound to each of them."""
    _unbound: str | None
    """Why gradients cannot be reduced now; None if they can."""
    _synchronized: bool
    """Whether synchronize() was called after the last step."""

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Names of the parameters, under the attribute that programs for Horovod use."""
        params = (param for group in self.param_groups for param in group["params"])
        return dict(zip(params, self._recipe.names, strict=False))

    def synchronize(self) -> None:
        """Finish reducing gradients, so that they may be read or changed (clipped) before `step`.

        You need it only if some parameters get no gradient in some backward passes. Otherwise all gradients are reduced
        when backward ends, and this returns at once. A later `step` does not reduce again.

        Raises:
            CollectiveError: A peer or the network failed.
            NotInitializedError: This is an elastic rank outside its worlds.
            RuntimeError: A DistributedOptimizer that was made later trains a parameter of this one.
            ValueError: A parameter was put into param_groups by other means than `add_param_group`.
        """
        require_bound(self)
        if self._reducer is not None:
            _synchronize(self, self._reducer)
            self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context, `step` does not reduce gradients."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many calls of backward() are summed before gradients are reduced.

        A value set inside an elastic function applies until the function is called again.

        Raises:
            ValueError: `passes` is not positive.
        """
        check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_passes(passes)
        elif self._unbound is not None:
            self._recipe.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer.zero_grad.

        Raises:
            AssertionError: gradients are being reduced; call `synchronize` or `step` first.
        """
        if self._reducer is not None:
            if self._reducer.in_flight:
                raise AssertionError(
                    "optimizer.zero_grad() was called while gradients are being reduced: "
                    "call optimizer.step() or optimizer.synchronize() after backward() first"
                )
            self._reducer.reset()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer.add_param_group. Call it on every rank, between steps.

        Raises:
            PlanMismatchError: Ranks add different parameters.
            MismatchError: A rank has called join().
        """
        if self._reducer is not None:
            require_everyone("add_param_group", self._recipe.process_set)
        del self._recipe.names[sum(len(group["params"]) for group in self.param_groups) :]  # of groups that have gone
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = self.param_groups[number]["params"]
        self._known.update((id(param), param) for param in added)
        replace_owners(added, by=self)
        names = [f"group{number}.param{i}" for i in range(len(added))]
        self._recipe.names += names
        self._recipe.scale_gradients(self)
        if self._reducer is not None:
            named = [(name, param) for name, param in zip(names, added, strict=True) if not is_local(param)]
            self._reducer.extend([param for _, param in named], [spec_of(*each) for each in named])
        elif self._unbound is None:  # only local parameters so far
            self._reducer = self._recipe.open(_params_of(self))

    def register_local_var(self, param: torch.nn.Parameter) -> None:
        """Exclude a parameter's gradient from reduction. Collective: every rank calls this before the first backward.

        Raises:
            ValueError: `param` is not a parameter of the optimizer.
            RuntimeError: gradients have been or are being reduced.
            PlanMismatchError: Ranks register different parameters.
        """
        mark_chosen(_params_of(self), [param])
        if self._reducer is not None:
            if self._reducer.started or self._reducer.buckets:
                raise RuntimeError(
                    "register_local_var() was called after the first backward(): call it before training, on every "
                    "rank, or pass local_parameters= to DistributedOptimizer"
                )
            self._reducer.restart(*self._recipe.reduced(_params_of(self)))
        self._recipe.scale_gradients(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer.load_state_dict; the count of backward passes restarts."""
        super().load_state_dict(state_dict)
        if self._reducer is not None and not self._reducer.in_flight:
            self._reducer.reset()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: GradientCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_cap_mb: float | None = None,
    shared_memory: bool = True,
    local_parameters: Iterable[torch.nn.Parameter] = (),
    scale_local_gradients: bool = True,
) -> ReducedOptimizer | AdasumOptimizer:
    """Make `optimizer` reduce gradients over all ranks. Collective: every rank must call it.

    In an elastic job, call it before the function decorated with hvd.elastic.run. It then does not wait for other
    ranks, and each generation binds the optimizer to its ranks. You may also call it inside the function, in each call.

    Earlier DistributedOptimizers of the same parameters are replaced: their `step` then raises a RuntimeError.

    It returns the same object. The object's class keeps its name and gains the methods of ReducedOptimizer, so learning
    rate schedulers and other holders of the optimizer keep working. Gradients are summed into flat buffers, bucket by
    bucket during backward, as in Li et al., "PyTorch Distributed" (VLDB 2020); `param.grad` is a view of a buffer.

    Args:
        optimizer: any torch optimizer over dense or sparse parameters, on CPU or GPU.
        named_parameters: `model.named_parameters()`. The names are used in errors; without them, names are generated.
        compression: `Compression.none`, `.fp16`, `.bf16` or an object with `compress` and `decompress`, which gets a
            one-dimensional bucket of gradients.
        backward_passes_per_step: calls of backward() whose gradients are summed (not averaged) before a step.
        op: `Average`, `Sum` or `Adasum`. With Adasum, each rank makes its own step, and the changes of the weights are
            combined (Maleki et al., arXiv 2006.02924); the arguments below `compression` then have no effect.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and by size / factor after.
        num_groups: deprecated: use `groups`.
        groups: a number of groups, or lists of parameters; each group is reduced in one piece.
        sparse_as_dense: reduce sparse gradients as dense ones instead of gathering indices and values of all ranks.
            The optimizer then gets dense gradients; SparseAdam gets the rows that are not zero.
        process_set: the ranks to reduce over; on other ranks the optimizer stays local.
        bucket_cap_mb: maximum size of a bucket in MiB, 25 by default. Autotuning does not change a given value.
        shared_memory: if all ranks are on one Linux host, reduce uncompressed buckets on the CPU in shared memory
            instead of over Gloo.
        local_parameters: parameters that each rank trains by itself, the same ones on every rank: their gradients are
            not reduced, and broadcast_parameters and broadcast_optimizer_state skip them and their state. The table
            of a ShardedEmbedding is always one.
        scale_local_gradients: with Average, divide the gradients of `local_parameters` by the number of ranks.

    Returns:
        `optimizer`.

    Raises:
        NotInitializedError: `init()` was not called.
        ValueError: An argument is invalid; the message says why.
        TypeError: `optimizer` is not an optimizer.
        PlanMismatchError: parameters or settings differ between ranks; raised on all of them.
    """
    check_kind(optimizer)
    check_passes(backward_passes_per_step)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(f"op={op!r}: DistributedOptimizer supports Average, Sum and Adasum")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average, got op={op!r}")
    params = _params_of(optimizer)
    names = names_of(optimizer, named_parameters)
    grouped = group_indices(chosen_groups(groups, num_groups), params)
    mark_chosen(params, local_parameters)
    if isinstance(optimizer, torch.optim.LBFGS) and any(is_local(param) for param in params):
        raise ValueError(
            "LBFGS decides by all gradients at once, but the gradients of local parameters differ between ranks: put "
            "these parameters into an optimizer of their own"
        )
    if process_set is not global_process_set and elastic_launcher.installed() is not None and not in_world():
        raise ValueError(
            f"process_set={process_set}: process sets end with the world, but an elastic rank moves from world to "
            "world; make this optimizer inside the function that is decorated with hvd.elastic.run."
        )
    replace_owners(params)

    if op is ReduceOp.ADASUM:
        return make_distributed_with_adasum(optimizer, names, process_set, compression)
    recipe = Recipe(
        names,
        grouped,
        op,
        compression,
        passes=backward_passes_per_step,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        bucket_cap_mb=bucket_cap_mb,
        shared_memory=shared_memory,
        scale_local=scale_local_gradients,
        loss_name=f"DistributedOptimizer.loss.{ordinal('loss')}" if isinstance(optimizer, torch.optim.LBFGS) else None,
    )
    if elastic_launcher.installed() is None or in_world():
        return _make_distributed(optimizer, recipe, recipe.open(params))
    return _make_distributed(optimizer, recipe, None, NOT_YET)


def _make_distributed(
    optimizer: torch.optim.Optimizer, recipe: Recipe, reducer: GradientReducer | None, unbound: str | None = None
) -> ReducedOptimizer:
    optimizer = make_distributed(optimizer, ReducedOptimizer)
    optimizer._recipe = recipe
    optimizer._reducer = reducer
    optimizer._unbound = unbound
    optimizer._spans_worlds = unbound is not None
    optimizer._synchronizes, optimizer._synchronized = True, False
    recipe.scale_gradients(optimizer)
    register_optimizer(optimizer)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    assert isinstance(optimizer, ReducedOptimizer)
    require_bound(optimizer, synchronizes=optimizer._synchronizes)
    reducer = optimizer._reducer
    if reducer is None:
        return None
    if not optimizer._synchronizes:
        if reducer.in_flight:
            raise AssertionError(
                "step() under skip_synchronize() while gradients are being reduced: call synchronize()"
            )
        _make_sparse_again(optimizer)
        return None
    if optimizer._synchronized and speaks_horovod():
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): Horovod would "
            "reduce the gradients once more; they are not reduced again here",
            stacklevel=3,
        )
    # Optimizer pre-hooks get the optimizer itself as the first of args.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _synchronize(optimizer, reducer)
        _make_sparse_again(optimizer)
        return None
    if reducer.started:  # gradients from before the closure, which it drops
        reducer.synchronize()
    reduced = _reducing(closure, optimizer, reducer)
    if len(args) > 1:
        return (args[0], reduced, *args[2:]), kwargs
    return args, {**kwargs, "closure": reduced}


def _reducing(closure: Callable[[], Any], optimizer: ReducedOptimizer, reducer: GradientReducer) -> Callable[[], Any]:
    def reduced() -> Any:
        loss = closure()
        _synchronize(optimizer, reducer)
        _make_sparse_again(optimizer)
        return optimizer._recipe.agreed(loss)

    return reduced


def _synchronize(optimizer: ReducedOptimizer, reducer: GradientReducer) -> None:
    require_known(optimizer)
    reducer.synchronize()
    _fill_missing(optimizer)


def _fill_missing(optimizer: ReducedOptimizer) -> None:
    """Give parameters that no rank has used zero gradients, in Horovod's dialect: weight decay changes them."""
    if speaks_horovod():
        for param in _params_of(optimizer):
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)


def _make_sparse_again(optimizer: ReducedOptimizer) -> None:
    """Convert gradients that were reduced as dense ones, if the optimizer accepts only sparse ones."""
    if optimizer._recipe.sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam):
        for param in _params_of(optimizer):
            if param.grad is not None and param.grad.layout is torch.strided:
                param.grad = param.grad.to_sparse(1)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, ReducedOptimizer)
    optimizer._synchronized = False
    if optimizer._reducer is not None:
        optimizer._reducer.stepped()
