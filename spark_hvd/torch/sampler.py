"""ElasticSampler: deals the samples of an epoch to however many ranks there are, in one order for all numbers."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch

from spark_hvd.context import who as basics


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The indices of a dataset, each once an epoch over all ranks, also if the number of ranks changes meanwhile.

    The order of an epoch is a permutation that depends on (seed, epoch, length of the dataset) and nothing else. What
    was processed is its first `processed_num` indices. From the next one on, indices are dealt out like cards: with n
    ranks, rank r gets those at places r, r + n, r + 2n, ... of what is left. If each rank makes batches of b, the ranks
    together so process the permutation in consecutive blocks of n * b, and if n * b is kept the same, the same blocks
    with any number of ranks.

    Dealing begins anew at `processed_num` in :meth:`reset`, which `TorchState` calls on a restore, a sync and a change
    of members; a sampler has to be part of the state. Until then every iteration gives the same indices again.

    All ranks get as many indices. At the end of an epoch, and there alone, up to n - 1 indices more are needed for
    that: they are taken from the beginning of the permutation, or else left out with `drop_last`.

    Args:
        dataset: Anything with a length, the same on all ranks.
        shuffle: Whether the order is random; else it is ascending.
        seed: Of the order; the same on all ranks.
        drop_last: Whether to leave out the up to n - 1 last indices of an epoch rather than to repeat others.

    Attributes:
        epoch: The present one.
        processed_num: How many indices of it all ranks together have processed.
    """

    __module__ = "spark_hvd.torch.elastic"

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, drop_last: bool = False) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 1
        self.rank = 0
        self.num_samples = 0
        self.total_size = 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed; the present one goes on where it is.

        So it may be called before an epoch's batches, also if the loop is entered in the middle of that epoch, or after
        them with the next one's number, as in Horovod.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.processed_num = 0
        elif 0 < len(self.dataset) <= self.processed_num:
            warnings.warn(
                f"set_epoch({epoch}): all samples of this epoch are processed, so there is nothing to iterate over. "
                f"Go on with set_epoch({epoch + 1}).",
                stacklevel=2,
            )
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed; every rank calls it for each batch, before the commit that is to have it.

        Args:
            batch_idx: Number of the batch; not used.
            batch_size: How many indices this rank processed: the same on all ranks.

        Raises:
            ValueError: `batch_size` is negative.
        """
        if batch_size < 0:
            raise ValueError(f"batch_size={batch_size}: expected how many samples this rank processed.")
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """The epoch and what of it is done, for :meth:`load_state_dict`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler of the same dataset and seed was, with the ranks that are there now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is left of the epoch among the ranks that are there now.

        Raises:
            NotInitializedError: Before init().
        """
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        order = self._order()
        self.remaining_indices = order[self.processed_num :]
        left = len(self.remaining_indices)
        shares = left / self.num_replicas
        self.num_samples = math.floor(shares) if self.drop_last else math.ceil(shares)
        self.total_size = self.num_samples * self.num_replicas
        dealt = self.remaining_indices[: self.total_size]
        dealt += [order[place % len(order)] for place in range(self.total_size - len(dealt))]
        self._indices = dealt[self.rank :: self.num_replicas]

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return self.num_samples
