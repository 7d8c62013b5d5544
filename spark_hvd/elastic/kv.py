"""Connects an elastic rank to the key-value store of a generation, and stops trying when the generation is aborted."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from spark_hvd.context.global_state import global_state
from spark_hvd.transport.registry import ConnectionRegistry
from spark_hvd.transport.torch_private import TCPStore
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.layout import Endpoint

_CONNECT_SECONDS = 30.0
"""Total time for connecting. The store runs before its address is known, so this is long enough."""
_ATTEMPT_SECONDS = 1.0
"""Time for one attempt. It is short, because torch cannot be interrupted when a rank learns that rank 0 is lost."""
_PAUSE_SECONDS = 0.1


def reach_store(endpoint: Endpoint, generation: int, timeout: float) -> TCPStore:
    """Connect to the store of rank 0 of a generation. :func:`spark_hvd.context.leave.abort` ends this too.

    Waiting for a key of the store ends after ``timeout`` seconds.

    Raises:
        CollectiveError: The store cannot be reached, or the generation was aborted.
    """
    registry = global_state.register_connections(ConnectionRegistry(generation, endpoint, 1))
    deadline = time.monotonic() + min(timeout, _CONNECT_SECONDS)
    with registry.establishing():
        while True:
            try:
                # A store that has ended refuses at once, but torch would try again.
                socket.create_connection((endpoint.host, endpoint.port), _ATTEMPT_SECONDS).close()
                kv = TCPStore(endpoint.host, endpoint.port, None, False, timedelta(seconds=_ATTEMPT_SECONDS))
            except (RuntimeError, OSError) as error:
                if registry.broken is not None or time.monotonic() > deadline:
                    raise CollectiveError(f"the store of generation {generation} cannot be reached: {error}") from error
                time.sleep(_PAUSE_SECONDS)
            else:
                kv.set_timeout(timedelta(seconds=timeout))
                return kv
