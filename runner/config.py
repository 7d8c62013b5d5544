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
"""The variable with the default of ``page``."""
PRELOAD = "SPARK_HVD_PRELOAD"
"""The variable with a comma-separated list of modules for the process that ranks are forked from to import."""
IMPORTS = "SPARK_HVD_IMPORTS"
"""The same for modules without side effects: other runs may be forked from that process too."""


@described
@dataclass(frozen=True, kw_only=True)
class Network:
    """How ranks reach each other and this program: ``run(fn, network=Network(ports="30000-30100"))``."""

    __module__ = "spark_hvd.runner"

    interfaces: Sequence[str] = option(
        (),
        'Interfaces ("eth1") or networks ("10.0.0.0/8") that the ranks use; each host takes the first one it has. By '
        "default, the interface with the address by which Spark knows the host.",
    )
    ports: str | None = option(
        None,
        'Ports on which this program and the ranks listen, as "30000-30100"; by default any. Gloo and NCCL still '
        "choose theirs from the kernel's range (sysctl net.ipv4.ip_local_port_range).",
    )
    mpi: str | None = option(
        None, 'Which MPI ``backend="mpi"`` uses: "mpich" (the default) or "openmpi".', choices=MPIS
    )
    collective_timeout: float = option(
        1800.0, "Seconds after which a collective fails if not all ranks have joined it.", seconds=True
    )


@dataclass(frozen=True, slots=True)
class PageAddress:
    """Where the page of a run listens, and the names under which proxies show it."""

    host: str = "127.0.0.1"
    port: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, asked: bool | str | None, source: str = "page") -> PageAddress | None:
        """Parse the value of an option; None for no page.

        Raises:
            ValueError: It is neither a truth value nor HOST:PORT. ``source`` names the option.
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
    """What is shown and recorded of a run, and where: ``run(fn, reporting=Reporting(progress="plain"))``."""

    __module__ = "spark_hvd.runner"

    progress: str = option(
        "auto",
        'How progress is shown: "table" on a terminal, "notebook", "plain" lines every 30 seconds, "json" lines, '
        '"off", or "auto" for the one that suits. See docs/progress.md.',
        choices=CHOICES,
    )
    price_per_hour: float | None = option(
        None,
        "Price of one rank per hour, including its cores, memory and GPUs, in any currency. The summary then states "
        "what the run has cost.",
        above_0=True,
        none="for no price",
    )
    page: bool | str | None = option(
        None,
        "Serve a page to watch the run in a browser, on a free port of the loopback interface (True) or on "
        '"HOST:PORT". Its address is printed on stderr. By default, the variable SPARK_HVD_PAGE decides. See '
        "docs/progress.md.",
    )
    tracker: Any = option(  # noqa: RUF009 - makes a field
        None,
        "Records the run elsewhere: ``spark_hvd.runner.MlflowTracker()``, or your own tracker. See docs/tracking.md.",
    )
    stdout: TextIO | None = option(None, "Text stream for the ranks' stdout instead of ``sys.stdout``.")  # noqa: RUF009
    stderr: TextIO | None = option(None, "Text stream for the ranks' stderr instead of ``sys.stderr``.")  # noqa: RUF009


GROUPS: Mapping[str, type[Any]] = {"network": Network, "reporting": Reporting}
"""Arguments, by name, that group several options."""
HERE = ("tracker", "stdout", "stderr")
"""Options that are objects of this program and are not sent to tasks."""


@dataclass(frozen=True, kw_only=True)
class CommonConfig(Network, Reporting):
    """The options that static and elastic runs have in common.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        TypeError: An argument of a wrong type.
    """

    num_proc: int | None = option(
        None,
        "Number of ranks; by default the number of task slots in the cluster.",
        least=1,
        unit="ranks",
        none="for every slot",
    )
    backend: str | None = option(
        None,
        '"gloo", "nccl" or "mpi"; by default NCCL for CUDA tensors and Gloo for CPU tensors.',
        choices=BACKENDS,
        none="to take NCCL for CUDA tensors and Gloo for CPU tensors",
    )
    env: Mapping[str, str | None] = field(
        default_factory=dict,
        metadata={"option": Option("Changes to the environment of the ranks; None as a value unsets a variable.")},
    )
    start_timeout: float = option(
        600.0, "Seconds for all ranks to start, including waiting for busy slots and importing torch.", seconds=True
    )
    timeout: float | None = option(
        None,
        "Seconds that fn may run per start; by default no limit. The error then has the stacks of every rank.",
        seconds=True,
    )
    verbose: int = option(
        1, "1 shows progress and what the ranks print, each line prefixed with ``[rank]``; 0 shows nothing."
    )
    cpus_per_proc: int | None = option(
        None,
        "Cores of each rank, and its OMP_NUM_THREADS; by default the application's setting.",
        least=1,
        unit="cores for each rank",
        none="for what the application gives",
    )
    gpus_per_proc: int | None = option(
        None,
        "GPUs of each rank, 0 to hide them; by default the application's setting.",
        least=0,
        unit="GPUs for each rank",
        none="for what the application gives",
    )
    seed: int | None = option(
        None,
        "Makes the ranks' random numbers repeatable: Python's, numpy's, torch's, and TensorFlow's if fn's module "
        "imports it. Each rank draws different numbers, the same in every run with this seed.",
        least=0,
        none="for other random numbers in each run",
    )
    min_num_proc: int | None = option(
        None,
        "Number of ranks that is enough for a restart if there are no slots for num_proc within start_timeout; by "
        "default num_proc.",
        least=1,
        unit="ranks",
        none="for num_proc",
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Make the config from the arguments of a function, and from the options in its Network and Reporting.

        None stands for the default; arguments that the config does not declare are ignored.
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
        """Ports on which ranks and the driver listen; None for any."""
        return None if self.ports is None else PortRange.parse(self.ports)

    def _check_together(self) -> None:
        """Check options against each other."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonConfig):
    """The options of ``run`` and ``run_local``."""

    procs_per_task: int = option(
        1, "Ranks in each Spark task; ``num_proc`` must be a multiple of it.", least=1, unit="ranks in each Spark task"
    )
    max_restarts: int = option(
        0,
        "Maximum number of restarts of all ranks after an executor is lost or a signal kills a rank. fn then runs from "
        "its start, on every rank, and must resume from a checkpoint (hvd.checkpoint). 0: fn never runs twice.",
        least=0,
    )

    feeders: int = option(
        0,
        "Number of additional Spark tasks that run the functions of ``spark_hvd.data.Mapped``; with 0 they run in the "
        "ranks.",
        least=0,
        unit="Spark tasks",
    )

    @property
    def num_tasks(self) -> int | None:
        """Number of Spark tasks that run at the same time; None for the number of slots."""
        return None if self.num_proc is None else self.num_proc // self.procs_per_task

    def _check_together(self) -> None:
        each, least = self.procs_per_task, self.min_num_proc
        if self.num_proc is not None and self.num_proc % each:
            raise ValueError(
                f"procs_per_task={each} with num_proc={self.num_proc}: expected a divisor of num_proc, because every "
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
