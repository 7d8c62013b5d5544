"""Gives a rank torchrun's environment, and no process group other than the one that the function creates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spark_hvd.context import basics, leave
from spark_hvd.runner.rank.script import Script, run_script

ROWS = "train"
"""The name of the data set that a DataFrame becomes."""


def run_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    one_node: bool,
    rows: str | None = None,
) -> Any:
    """Call a function in torchrun's environment, and return its value on rank 0; None on the other ranks.

    ``rows`` names the data set of :func:`get_spark_partition_data_loader`, if the run has one.
    """
    if rows is not None:
        from spark_hvd.runner.compat.partition import open_partition  # imports pyarrow, which takes 0.1 s

        open_partition(rows)
    first = basics.rank() == 0
    with _as_torchrun(one_node):
        value = function(*args, **kwargs)
    return value if first else None


def run_file(script: Script, one_node: bool) -> None:
    """Run a script in torchrun's environment."""
    with _as_torchrun(one_node):
        run_script(script)


@contextmanager
def _as_torchrun(one_node: bool) -> Iterator[None]:
    """Leave the ranks' world, and set torchrun's variables, so that the function can make its own with the same store.

    Without ``one_node``, each rank counts as a node, as each Spark task does for TorchDistributor: it sees one GPU,
    number 0.
    """
    import torch.distributed as dist

    rank, size = basics.rank(), basics.size()
    leave.shutdown()
    local, group = (rank, 0) if one_node else (0, rank)
    os.environ |= {
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(size if one_node else 1),
        "GROUP_RANK": str(group),
        "GROUP_WORLD_SIZE": str(1 if one_node else size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "spark_hvd",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield
    if dist.is_initialized():  # otherwise torch destroys the group at the exit, with a warning
        dist.destroy_process_group()
