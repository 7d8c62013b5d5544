"""The validated arguments of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from spark_hvd.runner.channel.address import check_wishes
from spark_hvd.runner.options import Option, described, option, options_of
from spark_hvd.world.ports import PortRange

if TYPE_CHECKING:
    from typing_extensions import Self

BACKENDS = ("gloo", "nccl", "mpi")
MPIS = ("mpich", "openmpi")
CHOICES = ("auto", "table", "notebook", "plain", "json", "off")
PAGE = "SPARK_HVD_PAGE"
"""The variable that says what ``page`` is of runs that do not say it."""
PRELOAD = "SPARK_HVD_PRELOAD"
"""The variable that names modules, with commas, which the process that ranks are forked from imports before."""
IMPORTS = "SPARK_HVD_IMPORTS"
"""The same for modules that compute nothing when they are imported: other runs may be forked from that process too."""


@described
@dataclass(frozen=True, kw_only=True)
class Network:
    """How ranks reach each other and this program: ``run(fn, network=Network(ports="30000-30100"))``."""

    __module__ = "spark_hvd.runner"

    interfaces: Sequence[str] = option(
        (),
        'Interfaces ("eth1") or networks ("10.0.0.0/8") over which ranks are to talk; each host takes the first that '
        "it has. By default, what carries the address by which Spark knows the host.",
    )
    ports: str | None = option(
        None,
        'Where this program and the ranks may listen, as "30000-30100"; by default anywhere. Gloo and NCCL choose '
        "theirs from the kernel's range all the same (sysctl net.ipv4.ip_local_port_range).",
    )
    mpi: str | None = option(
        None, 'Which MPI, for ``backend="mpi"``: "mpich" (the default) or "openmpi".', choices=MPIS
    )
    collective_timeout: float = option(
        1800.0, "Seconds after which a collective fails that not all ranks have joined.", seconds=True
    )


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the page of a run listens, and under which names a proxy shows it besides its own."""

    host: str = "127.0.0.1"
    port: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, asked: bool | str | None, source: str = "page") -> PageAddress | None:
        """Read what was asked for; None for no page.

        Raises:
            ValueError: it is neither a truth value nor HOST:PORT; ``source`` is what it was given by.
        """
        text = str(asked).strip().lower()
        if text in ("none", "false", "0", "off", "no", ""):
            return None
        if text in ("true", "1", "on", "yes"):
            return cls()
        at, *names = (part.strip() for part in text.split(","))
        found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:/\s]*)(?::(\d{1,5}))?", f":{at}" if at.isdecimal() else at)
        if found is None or int(found[2] or 0) > 65535 or not all(names):
            raise ValueError(
                f'{source}={asked!r}: expected True, or HOST:PORT, such as "127.0.0.1:8080", with commas before '
                'further names under which a proxy shows the page: "0.0.0.0:8080,hub.example.com"'
            )
        return cls(found[1].strip("[]") or cls().host, int(found[2] or 0), tuple(names))


@described
@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What is shown and kept of a run, and where: ``run(fn, reporting=Reporting(progress="plain"))``."""

    __module__ = "spark_hvd.runner"

    progress: str = option(
        "auto",
        'How the run is shown while it goes on: "table" on a terminal, "notebook", "plain" lines every 30 seconds, '
        '"json" lines, or "off"; "auto" takes what suits. See docs/progress.md.',
        choices=CHOICES,
    )
    price_per_hour: float | None = option(
        None,
        "What an hour of one rank costs, its cores, memory and GPUs included, in any currency: the summary at the end "
        "then says what the run has cost. None for no price.",
        above_0=True,
        none="for no price",
    )
    page: bool | str | None = option(
        None,
        "Whether the run can be watched in a browser; the address is printed on stderr. True listens on this machine's "
        'loopback interface and any port; "HOST:PORT" elsewhere, see docs/progress.md. None for what the variable '
        "SPARK_HVD_PAGE says, or no page.",
    )
    tracker: Any = option(  # noqa: RUF009 - makes a field
        None,
        "Keeps a record of the run elsewhere: ``spark_hvd.runner.MlflowTracker()``, or one of yours. See "
        "docs/tracking.md.",
    )
    stdout: TextIO | None = option(None, "Text stream for the ranks' stdout instead of ``sys.stdout``.")  # noqa: RUF009
    stderr: TextIO | None = option(None, "Text stream for the ranks' stderr instead of ``sys.stderr``.")  # noqa: RUF009


GROUPS: Mapping[str, type[Any]] = {"network": Network, "reporting": Reporting}
"""Arguments of the functions that start ranks which are several options, by name."""
HERE = ("tracker", "stdout", "stderr")
"""Options that are objects of this program and do not travel to tasks."""


@dataclass(frozen=True, kw_only=True)
class CommonConfig(Network, Reporting):
    """The options that static and elastic runs have in common.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        TypeError: an argument of a wrong type.
    """

    num_proc: int | None = option(
        None,
        "Number of ranks; None for as many as the cluster has task slots.",
        least=1,
        unit="ranks",
        none="for every slot",
    )
    backend: str | None = option(
        None,
        '"gloo", "nccl", "mpi", or None for NCCL on CUDA tensors and Gloo on CPU tensors.',
        choices=BACKENDS,
        none="to take NCCL for CUDA tensors and Gloo for CPU tensors",
    )
    env: Mapping[str, str | None] = field(
        default_factory=dict,
        metadata={"option": Option("Changes to the environment of the ranks; None as a value unsets a variable.")},
    )
    start_timeout: float = option(
        600.0, "Seconds for all ranks to be up: includes waiting for busy slots and importing torch.", seconds=True
    )
    timeout: float | None = option(
        None,
        "Seconds that fn may run in one start, or None for no limit. When over, every rank's stacks are in the error.",
        seconds=True,
    )
    verbose: int = option(
        1, "0 shows nothing, 1 what ranks print, each line with ``[rank]`` before it, and how far they are."
    )
    cpus_per_proc: int | None = option(
        None,
        "Cores for each rank, which is also its OMP_NUM_THREADS; None for what the application gives.",
        least=1,
        unit="cores for each rank",
        none="for what the application gives",
    )
    gpus_per_proc: int | None = option(
        None,
        "GPUs for each rank, 0 to hide them; None for what the application gives.",
        least=0,
        unit="GPUs for each rank",
        none="for what the application gives",
    )
    seed: int | None = option(
        None,
        "Makes the ranks' random numbers repeatable: Python's, numpy's, torch's, and TensorFlow's where fn's module "
        "imports it. Each rank draws its own, the same in every run with this seed. None for others in each run.",
        least=0,
        none="for other random numbers in each run",
    )
    min_num_proc: int | None = option(
        None,
        "Ranks that are enough for a restart where the slots for num_proc do not come back within start_timeout; None "
        "for num_proc.",
        least=1,
        unit="ranks",
        none="for num_proc",
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """The config of those arguments of a function that it declares, or that lie in a Network or a Reporting.

        None stands for the default.
        """
        given: dict[str, Any] = {}
        for name, kind in GROUPS.items():
            group = arguments.get(name)
            if group is not None and not isinstance(group, kind):
                raise TypeError(f"{name}={group!r}: expected a spark_hvd.{kind.__name__}(...)")
            given |= {each: getattr(group, each) for each in options_of(kind)} if group is not None else {}
        given |= arguments
        return cls(**{name: given[name] for name in options_of(cls) if given.get(name) is not None})

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        options = {each: getattr(self, each) for each in options_of(type(self)) if each not in HERE}
        return partial(type(self), **options), ()

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            declared.check(name, getattr(self, name))
        if isinstance(self.interfaces, str) or not all(isinstance(each, str) for each in self.interfaces):
            raise TypeError(
                f'interfaces={self.interfaces!r}: expected a list of names and networks, such as ["eth1", "10.0.0.0/8"]'
            )
        self.port_range  # noqa: B018 - raises
        if not isinstance(self.page, bool | str | None):
            raise TypeError(f'page={self.page!r}: expected True, False, or text such as "127.0.0.1:8080"')
        PageAddress.parse(self.page)
        check_wishes(self.interfaces)
        for key, value in self.env.items():
            if not isinstance(key, str) or not isinstance(value, str | None):
                raise TypeError(f"env[{key!r}]={value!r}: expected text, or None to unset the variable in the ranks")
        if self.mpi is not None and self.backend != "mpi":
            raise ValueError(f'mpi={self.mpi!r} with backend={self.backend!r}: expected backend="mpi"')
        self._check_together()

    @property
    def port_range(self) -> PortRange | None:
        """Where ranks and the driver may listen; None for any port."""
        return None if self.ports is None else PortRange.parse(self.ports)

    def _check_together(self) -> None:
        """What options must be to each other."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonConfig):
    """What ``run`` and ``run_local`` were asked for: the declaration of their options."""

    procs_per_task: int = option(
        1, "Ranks in each Spark task; ``num_proc`` must be a multiple of it.", least=1, unit="ranks in each Spark task"
    )
    max_restarts: int = option(
        0,
        "How often all ranks are started again after an executor was lost, or a rank was killed by a signal. fn then "
        "runs from its start, on every rank, and is to go on from a checkpoint (hvd.checkpoint). 0: fn never runs "
        "twice.",
        least=0,
    )

    feeders: int = option(
        0,
        "Spark tasks, beside those of the ranks, in which the functions of ``spark_hvd.data.Mapped`` run; 0 to have "
        "them run in the ranks.",
        least=0,
        unit="Spark tasks",
    )

    @property
    def num_tasks(self) -> int | None:
        """Spark tasks that run at the same time; None for as many as there are slots."""
        return None if self.num_proc is None else self.num_proc // self.procs_per_task

    def _check_together(self) -> None:
        each, least = self.procs_per_task, self.min_num_proc
        if self.num_proc is not None and self.num_proc % each:
            raise ValueError(
                f"procs_per_task={each} with num_proc={self.num_proc}: expected a number that divides num_proc: every "
                "Spark task has the same number of ranks"
            )
        if least is None:
            return
        if not self.max_restarts:
            raise ValueError(
                f"min_num_proc={least} with max_restarts=0: it says how many ranks are enough for a restart; give "
                "max_restarts too"
            )
        if least % each or (self.num_proc is not None and least > self.num_proc):
            raise ValueError(
                f"min_num_proc={least} with num_proc={self.num_proc}, procs_per_task={each}: expected a multiple of "
                "procs_per_task, from 1 to num_proc"
            )
