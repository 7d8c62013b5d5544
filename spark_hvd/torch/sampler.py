"""ElasticSampler divides the samples of an epoch among any number of ranks, in an order that does not depend on it."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch

from spark_hvd.context import basics


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The indices of a dataset, each once per epoch over all ranks, even if the number of ranks changes.

    The order of an epoch is a permutation that depends only on (seed, epoch, length of the dataset). Its first
    `processed_num` indices have been processed. The rest is divided: of n ranks, rank r gets the indices at positions
    r, r + n, r + 2n, ... of the rest. With batches of b, the ranks together process consecutive blocks of n * b; if n
    * b stays the same, the blocks are the same for any number of ranks.

    :meth:`reset` divides the rest again. `TorchState` calls it on a restore, a sync and a change of members, so the
    sampler must be part of the state. Until then, every iteration yields the same indices.

    All ranks get the same number of indices. If the last round is incomplete, up to n - 1 indices from the beginning of
    the permutation complete it, or, with `drop_last`, it is dropped.

    Args:
        dataset: Anything with a length, the same on all ranks.
        shuffle: Whether the order is random or ascending.
        seed: Seed of the order; the same on all ranks.
        drop_last: Drop up to n - 1 indices at the end of an epoch instead of repeating others.

    Attributes:
        epoch: The current epoch.
        processed_num: How many of its indices all ranks together have processed.
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
        """Begin another epoch, with nothing processed; the current one keeps its progress.

        You may therefore call it before an epoch's batches, even within that epoch, or after them with the next number,
        as in Horovod.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.processed_num = 0
        elif 0 < len(self.dataset) <= self.processed_num:
            warnings.warn(
                f"set_epoch({epoch}): all samples of this epoch are processed, so there is nothing to iterate over. "
                f"Continue with set_epoch({epoch + 1}).",
                stacklevel=2,
            )
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed. Every rank calls it for each batch, before the commit that includes the batch.

        Args:
            batch_idx: Number of the batch; not used.
            batch_size: How many indices this rank has processed; the same on all ranks.

        Raises:
            ValueError: `batch_size` is negative.
        """
        if batch_size < 0:
            raise ValueError(f"batch_size={batch_size}: expected how many samples this rank processed.")
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its progress, for :meth:`load_state_dict`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position of another sampler of the same dataset and seed, with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the current ranks.

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
