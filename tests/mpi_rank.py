"""A rank that mpiexec starts for tests.ranks: `python -m tests.mpi_rank ADDRESS TIMEOUT JOIN`."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client

from tests.ranks import serve


def main() -> None:
    """Join the world if asked to, and serve calls."""
    address, timeout, join = sys.argv[1:]
    if int(join):
        from spark_hvd.context import init as context
        from spark_hvd.transport.mpi.start import world_of

        world, kv = world_of()
        context.join(world, kv, timeout=float(timeout), backend="mpi")
    with Client(address) as pipe:
        pipe.send(int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]))
        serve(pipe)


if __name__ == "__main__":
    main()
