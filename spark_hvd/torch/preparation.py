"""``prepare`` turns a program for one process into one that trains on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from spark_hvd.context.basics import rank, size
from spark_hvd.torch.optimizer.adasum import AdasumOptimizer
from spark_hvd.torch.optimizer.distributed import DistributedOptimizer, ReducedOptimizer
from spark_hvd.torch.sampler import ElasticSampler
from spark_hvd.torch.sync import broadcast_optimizer_state, broadcast_parameters

_REDUCE_THEMSELVES = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")


def prepare(*objects: Any, root_rank: int = 0, seed: int = 0, **options: Any) -> Any:
    """Prepare models, optimizers and loaders for all ranks. Collective: same kinds, in the same order, on every rank.

        model, optimizer, loader = hvd.prepare(model, optimizer, loader)

    - A ``torch.nn.Module`` gets the parameters and buffers of ``root_rank``.
    - A torch optimizer gets its state and hyper-parameters, and becomes a :func:`DistributedOptimizer`.
    - A ``DataLoader`` gives each rank the same number of samples, in a new order every epoch if it shuffles. Up to
      ``size() - 1`` samples are repeated for that, as by ``DistributedSampler``. Its ``batch_size`` is that of one
      rank. Every rank must iterate over it equally often.

    Every argument is optional. Objects that already handle several ranks stay unchanged: a model in
    DistributedDataParallel or FSDP with its optimizer, a DistributedOptimizer, a loader with a DistributedSampler or an
    ElasticSampler. Nothing is moved to a GPU, and no learning rate is changed. Elastic runs use a state and an
    ElasticSampler instead: see ``hvd.elastic``.

    Args:
        objects: Modules, optimizers and DataLoaders.
        root_rank: The rank whose weights and optimizer state all ranks get.
        seed: Seed of the order of samples if a loader shuffles; the same on all ranks.
        options: Options of DistributedOptimizer, such as ``compression`` or ``backward_passes_per_step``.

    Returns:
        The objects in the same order, or the object itself if there is one. Models and optimizers are those passed; a
        loader is a copy.

    Raises:
        NotInitializedError: Before init().
        TypeError: An object is of another kind.
        ValueError: A loader's samples cannot be divided: it has an IterableDataset or its own samplers.
        MismatchError: Models or optimizers differ between ranks. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    for number, each in enumerate(objects):
        if not isinstance(each, torch.nn.Module | torch.optim.Optimizer | DataLoader):
            raise TypeError(
                f"argument {number} of hvd.prepare is a {type(each).__name__}: expected models, optimizers and "
                "DataLoaders. Omit others: schedulers of a prepared optimizer need no change"
            )
    loaders = {id(each): _sharded(each, seed) for each in objects if isinstance(each, DataLoader)}
    models = [each for each in objects if isinstance(each, torch.nn.Module)]
    for model in models:
        if not _reduces_itself(model):
            broadcast_parameters(model.state_dict(), root_rank)
    for each in objects:
        if isinstance(each, torch.optim.Optimizer):
            _prepare_optimizer(each, models, root_rank, options)
    prepared = [loaders.get(id(each), each) for each in objects]
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _prepare_optimizer(
    optimizer: torch.optim.Optimizer, models: list[torch.nn.Module], root_rank: int, options: dict[str, Any]
) -> None:
    if isinstance(optimizer, ReducedOptimizer | AdasumOptimizer):
        return
    mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
    its = [model for model in models if any(id(param) in mine for param in model.parameters())]
    if any(map(_reduces_itself, its)):
        return
    broadcast_optimizer_state(optimizer, root_rank)
    named = [pair for model in its for pair in model.named_parameters() if id(pair[1]) in mine]
    DistributedOptimizer(optimizer, named if len(its) == 1 and len(named) == len(mine) else None, **options)


def _reduces_itself(model: torch.nn.Module) -> bool:
    """Return whether the model, or a part of it, is a torch wrapper that broadcasts weights and averages gradients."""
    return any(
        base.__module__.startswith(_REDUCE_THEMSELVES) for module in model.modules() for base in type(module).__mro__
    )


class _EpochSampler(DistributedSampler[int]):
    """Moves on to the next epoch by itself; ``set_epoch`` can still choose the next one."""

    def __iter__(self) -> Iterator[int]:
        order = super().__iter__()
        self.epoch += 1
        return order


def _sharded(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a copy that loads this rank's share."""
    batches: Any = loader.batch_sampler
    sampler: Any = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    if isinstance(sampler, DistributedSampler | ElasticSampler):
        return loader
    why = None
    if isinstance(loader.dataset, IterableDataset):
        why = "an IterableDataset: its __iter__ must select each rank's share, by hvd.rank() and hvd.size()"
    elif batches is not None and type(batches) is not BatchSampler:
        why = f"a batch_sampler of its own, {type(batches).__name__}: it must divide the batches"
    elif (
        type(sampler) not in (RandomSampler, SequentialSampler)
        or getattr(sampler, "replacement", False)
        or len(sampler) != len(loader.dataset)  # type: ignore[arg-type]
    ):
        why = f"a sampler of its own, {type(sampler).__name__}: it must divide the samples"
    if why is not None:
        raise ValueError(f"hvd.prepare cannot divide the samples of a DataLoader with {why}. Then omit the loader")
    own = _EpochSampler(
        loader.dataset, num_replicas=size(), rank=rank(), shuffle=isinstance(sampler, RandomSampler), seed=seed
    )
    # A copy keeps all arguments, even a subclass's. DataLoader refuses assignment, but object does not.
    shared = copy.copy(loader)
    shared._iterator = None
    object.__setattr__(shared, "sampler", own)
    if batches is not None:
        object.__setattr__(shared, "batch_sampler", BatchSampler(own, batches.batch_size, batches.drop_last))
    return shared
