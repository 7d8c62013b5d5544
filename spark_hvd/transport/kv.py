"""torch's key-value stores, in the one place that knows under which names torch keeps them."""

from __future__ import annotations

# Public in torch.distributed at run time, but torch's stubs export them here only.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore"]
