"""The loader that PyTorch takes for a data set of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from spark_hvd.data.loader import ShardLoader

T_co = TypeVar("T_co", covariant=True)


class TorchLoader(ShardLoader[T_co], IterableDataset[T_co]):
    """Whole batches, for ``for`` loops, Lightning, and ``DataLoader(loader, batch_size=None)``.

    In worker processes of a DataLoader each takes every n-th batch, and reads all; ``num_workers=0`` is quicker unless
    ``collate_fn`` is slow, because the loader reads ahead by threads of its own.
    """

    __module__ = "spark_hvd.data"

    def __iter__(self) -> Iterator[T_co]:
        """See base class."""
        batches, worker = super().__iter__(), get_worker_info()
        return batches if worker is None else itertools.islice(batches, worker.id, None, worker.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """See base class.

        Raises:
            RuntimeError: in a worker process, which does not know what the others gave.
        """
        if get_worker_info() is not None:
            raise RuntimeError(
                "state_dict in a worker process of a DataLoader: expected num_workers=0, where one process counts"
            )
        return super().state_dict()
