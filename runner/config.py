"""The validated arguments of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spark_hvd.runner.channel.address import check_wishes
from spark_hvd.world.ports import PortRange

BACKENDS = ("gloo", "nccl", "mpi")
MPIS = ("mpich", "openmpi")
CHOICES = ("auto", "table", "notebook", "plain", "json", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What ``run`` and ``run_local`` were asked for.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        TypeError: an argument of a wrong type.
    """

    num_proc: int | None = None
    backend: str | None = None
    mpi: str | None = None
    procs_per_task: int = 1
    interfaces: Sequence[str] = ()
    ports: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    start_timeout: float = 600.0
    timeout: float | None = None
    collective_timeout: float = 1800.0
    verbose: int = 1
    progress: str = "auto"
    cpus_per_proc: int | None = None
    gpus_per_proc: int | None = None
    max_restarts: int = 0
    min_num_proc: int | None = None

    def __post_init__(self) -> None:
        if self.num_proc is not None:
            if isinstance(self.num_proc, bool) or not isinstance(self.num_proc, int):
                raise TypeError(f"num_proc={self.num_proc!r}: expected a whole number of ranks, or None for every slot")
            if self.num_proc < 1:
                raise ValueError(f"num_proc={self.num_proc}: expected at least 1 rank, or None for every slot")
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(
                f"backend={self.backend!r}: expected one of {', '.join(map(repr, BACKENDS))}, or None to take NCCL for "
                "CUDA tensors and Gloo for CPU tensors"
            )
        if self.mpi is not None and (self.mpi not in MPIS or self.backend != "mpi"):
            raise ValueError(
                f"mpi={self.mpi!r} with backend={self.backend!r}: expected one of {', '.join(map(repr, MPIS))}, with "
                'backend="mpi"'
            )
        check_progress(self.progress)
        self._check_tasks()
        self._check_restarts()
        if isinstance(self.interfaces, str) or not all(isinstance(each, str) for each in self.interfaces):
            raise TypeError(
                f'interfaces={self.interfaces!r}: expected a list of names and networks, such as ["eth1", "10.0.0.0/8"]'
            )
        self.port_range  # noqa: B018 - raises
        check_wishes(self.interfaces)
        for name, least, what in (("cpus_per_proc", 1, "cores"), ("gpus_per_proc", 0, "GPUs")):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}: expected a whole number of {what} for each rank, or None")
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected at least {least}, or None for what the application gives")
        for name in ("start_timeout", "collective_timeout", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: expected a number of seconds above 0")
        for key, value in self.env.items():
            if not isinstance(key, str) or not isinstance(value, str | None):
                raise TypeError(f"env[{key!r}]={value!r}: expected text, or None to unset the variable in the ranks")

    @property
    def port_range(self) -> PortRange | None:
        """Where ranks and the driver may listen; None for any port."""
        return None if self.ports is None else PortRange.parse(self.ports)

    @property
    def num_tasks(self) -> int | None:
        """Spark tasks that run at the same time; None for as many as there are slots."""
        return None if self.num_proc is None else self.num_proc // self.procs_per_task

    def _check_tasks(self) -> None:
        each = self.procs_per_task
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(f"procs_per_task={each!r}: expected a whole number of ranks in each Spark task")
        if each < 1 or (self.num_proc is not None and self.num_proc % each):
            raise ValueError(
                f"procs_per_task={each} with num_proc={self.num_proc}: expected at least 1, and a number that divides "
                "num_proc: every Spark task has the same number of ranks"
            )

    def _check_restarts(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int):
            raise TypeError(f"max_restarts={self.max_restarts!r}: expected a whole number")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: expected 0, for none, or more")
        least, each = self.min_num_proc, self.procs_per_task
        if least is None:
            return
        if isinstance(least, bool) or not isinstance(least, int):
            raise TypeError(f"min_num_proc={least!r}: expected a whole number of ranks, or None for num_proc")
        if not self.max_restarts:
            raise ValueError(
                f"min_num_proc={least} with max_restarts=0: it says how many ranks are enough for a restart; give "
                "max_restarts too"
            )
        if least < 1 or least % each or (self.num_proc is not None and least > self.num_proc):
            raise ValueError(
                f"min_num_proc={least} with num_proc={self.num_proc}, procs_per_task={each}: expected a multiple of "
                "procs_per_task, from 1 to num_proc"
            )


def check_progress(progress: str) -> None:
    """Make sure that there is such a display.

    Args:
        progress: The argument of ``run``.

    Raises:
        ValueError: There is not, or it is "notebook" outside of one.
    """
    if progress not in CHOICES:
        raise ValueError(f"progress={progress!r}: expected one of {', '.join(map(repr, CHOICES))}.")
    if progress == "notebook" and not in_notebook():
        raise ValueError(
            "progress='notebook': this program does not run in a notebook; 'auto' is a table where it does."
        )


def in_notebook() -> bool:
    """Whether this program runs in a notebook's kernel."""
    interactive = sys.modules.get("IPython")  # a notebook's kernel has imported it
    shell = None if interactive is None else interactive.get_ipython()
    return getattr(shell, "kernel", None) is not None
