"""The validated arguments of an elastic run."""

from __future__ import annotations

from dataclasses import dataclass

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.elastic.membership.events import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """What ``run_elastic`` was asked for, besides what it has in common with ``run``.

    Args:
        common: Those; its `num_proc` is given.
        min_num_proc: None for `num_proc`.
        max_num_proc: None for `num_proc`.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        TypeError: an argument of a wrong type.
    """

    common: RunConfig
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    elastic_timeout: float = 600.0
    reset_limit: int | None = None
    rejoin_timeout: float = 30.0
    host_failure_limit: int = 2
    cooldown_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.common.backend == "mpi":
            raise ValueError(
                'backend="mpi": MPI ends all ranks when one is lost, and takes in none, so it cannot be elastic. Use '
                'backend="gloo" or "nccl", or spark_hvd.run(backend="mpi", max_restarts=...)'
            )
        num_proc = self.common.num_proc
        for name in ("min_num_proc", "max_num_proc", "reset_limit", "host_failure_limit"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}: expected a whole number")
        for name in ("min_num_proc", "max_num_proc"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1 rank, or None for num_proc")
        least, greatest = self.min_num_proc or num_proc, self.max_num_proc or num_proc
        if num_proc is not None and not (least or 1) <= num_proc <= (greatest or num_proc):
            raise ValueError(
                f"min_num_proc={self.min_num_proc}, num_proc={num_proc}, max_num_proc={self.max_num_proc}: expected "
                "1 <= min_num_proc <= num_proc <= max_num_proc"
            )
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ValueError(f"reset_limit={self.reset_limit}: expected 0 or more failures, or None for any number")
        if self.host_failure_limit < 1:
            raise ValueError(f"host_failure_limit={self.host_failure_limit}: expected at least 1 failure")
        for name in ("elastic_timeout", "rejoin_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number of seconds above 0")
        times = self.cooldown_range
        if times is not None and (len(times) != 2 or not 0 < times[0] <= times[1]):
            raise ValueError(
                f"cooldown_range={times!r}: expected the least and the greatest number of seconds for which a host is "
                "excluded, such as (10, 600); None for ever"
            )

    @property
    def limits(self) -> Limits:
        """The rules of the run."""
        num_proc = self.common.num_proc
        assert num_proc is not None
        return Limits(
            num_proc=num_proc,
            min_num_proc=self.min_num_proc or num_proc,
            max_num_proc=self.max_num_proc or num_proc,
            start_timeout=self.common.start_timeout,
            elastic_timeout=self.elastic_timeout,
            reset_limit=self.reset_limit,
            rejoin_timeout=self.rejoin_timeout,
            host_failure_limit=self.host_failure_limit,
            cooldown=self.cooldown_range,
        )
