"""How an elastic rank reaches the key-value store of a generation: it tries no longer than the generation lasts."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from spark_hvd.context.standing import standing
from spark_hvd.transport.registry import ConnectionRegistry
from spark_hvd.transport.torch_private import TCPStore
from spark_hvd.world.errors import CollectiveError
from spark_hvd.world.layout import Endpoint

_CONNECT_SECONDS = 30.0
"""The store is served before its address is known, so this is long."""
_ATTEMPT_SECONDS = 1.0
"""torch goes on trying, deaf to everything, though a rank may have learnt that rank 0 has gone."""
_PAUSE_SECONDS = 0.1


def reach_store(endpoint: Endpoint, generation: int, timeout: float) -> TCPStore:
    """Connect to the store that rank 0 of a generation serves; :func:`spark_hvd.context.init.abort` ends that too.

    The store gives up waiting for a key after ``timeout`` seconds.

    Raises:
        CollectiveError: It cannot be reached, or the generation was aborted.
    """
    registry = standing.register_connections(ConnectionRegistry(generation, endpoint, 1))
    until = time.monotonic() + min(timeout, _CONNECT_SECONDS)
    with registry.establishing():
        while True:
            try:
                # A store that is gone refuses at once, which torch would not take for an answer.
                socket.create_connection((endpoint.host, endpoint.port), _ATTEMPT_SECONDS).close()
                kv = TCPStore(endpoint.host, endpoint.port, None, False, timedelta(seconds=_ATTEMPT_SECONDS))
            except (RuntimeError, OSError) as error:
                if registry.broken is not None or time.monotonic() > until:
                    raise CollectiveError(f"the store of generation {generation} cannot be reached: {error}") from error
                time.sleep(_PAUSE_SECONDS)
            else:
                kv.set_timeout(timedelta(seconds=timeout))
                return kv
