"""The validated arguments of an elastic run."""

from __future__ import annotations

from dataclasses import dataclass

from spark_hvd.runner.config import CommonConfig
from spark_hvd.runner.elastic.membership.events import Limits
from spark_hvd.runner.options import option, reworded


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(CommonConfig):
    """The options of ``run_elastic``.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        TypeError: An argument of a wrong type.
    """

    num_proc: int | None = reworded(
        CommonConfig, "num_proc", "Number of ranks at the start; by default the number of task slots in the cluster."
    )
    backend: str | None = reworded(
        CommonConfig,
        "backend",
        '"gloo" or "nccl"; by default NCCL for CUDA tensors and Gloo for CPU tensors. MPI is not elastic.',
    )
    start_timeout: float = reworded(
        CommonConfig, "start_timeout", "Seconds to wait for `num_proc` tasks; after that, `min_num_proc` are enough."
    )
    timeout: float | None = reworded(CommonConfig, "timeout", "Seconds for the whole run; by default no limit.")
    min_num_proc: int | None = reworded(
        CommonConfig, "min_num_proc", "Minimum number of ranks; with fewer, they wait. By default `num_proc`."
    )
    max_num_proc: int | None = option(
        None, "Maximum number of ranks; by default `num_proc`.", least=1, unit="ranks", none="for num_proc"
    )
    elastic_timeout: float = option(
        600.0,
        "Seconds to wait for `min_num_proc` ranks after a loss, and for ranks that cannot reach each other.",
        seconds=True,
    )
    reset_limit: int | None = option(
        None,
        "Maximum number of failures; by default no limit. Ranks that join, or leave because their executor is "
        "decommissioned, do not count.",
        least=0,
        unit="failures",
        none="for any number",
    )
    rejoin_timeout: float = option(
        30.0,
        "Seconds for a rank to return after a failure elsewhere, and to join the others; must exceed the longest step. "
        "A rank that takes longer counts as hung and is replaced.",
        seconds=True,
    )
    host_failure_limit: int = option(
        2,
        "Number of ranks that may fail on a host, without a commit of theirs in between, before it is excluded.",
        least=1,
        unit="failures",
    )
    cooldown_range: tuple[float, float] | None = option(
        None,
        "Minimum and maximum seconds for which a host is then excluded, doubled each time; by default the rest of the "
        "run.",
    )

    def _check_together(self) -> None:
        if self.backend == "mpi":
            raise ValueError(
                'backend="mpi": MPI ends all ranks when one is lost, and lets none join, so it cannot be elastic. Use '
                'backend="gloo" or "nccl", or spark_hvd.run(backend="mpi", max_restarts=...)'
            )
        num_proc = self.num_proc
        least, greatest = self.min_num_proc or num_proc, self.max_num_proc or num_proc
        if num_proc is not None and not (least or 1) <= num_proc <= (greatest or num_proc):
            raise ValueError(
                f"min_num_proc={self.min_num_proc}, num_proc={num_proc}, max_num_proc={self.max_num_proc}: expected "
                "1 <= min_num_proc <= num_proc <= max_num_proc"
            )
        times = self.cooldown_range
        if times is not None and (len(times) != 2 or not 0 < times[0] <= times[1]):
            raise ValueError(
                f"cooldown_range={times!r}: expected the minimum and the maximum number of seconds for which a host is "
                "excluded, such as (10, 600); None means forever"
            )

    @property
    def limits(self) -> Limits:
        """The rules of the run."""
        num_proc = self.num_proc
        assert num_proc is not None
        return Limits(
            num_proc=num_proc,
            min_num_proc=self.min_num_proc or num_proc,
            max_num_proc=self.max_num_proc or num_proc,
            start_timeout=self.start_timeout,
            elastic_timeout=self.elastic_timeout,
            reset_limit=self.reset_limit,
            rejoin_timeout=self.rejoin_timeout,
            host_failure_limit=self.host_failure_limit,
            cooldown=self.cooldown_range,
        )
