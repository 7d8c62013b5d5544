"""torch's key-value stores, in the one place that knows under which names torch keeps them."""

from __future__ import annotations

import torch.distributed as dist

# Public in torch.distributed at run time, but torch's stubs export them here only.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "default_group_store"]


def default_group_store() -> Store:
    """The store over which the default process group was initialised; torch has no public way to it."""
    assert dist.is_initialized()
    return _get_default_store()
