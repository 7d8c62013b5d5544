"""Databricks' HorovodRunner: its constructor and its ``run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_hvd.runner.launch.local import run_local
from spark_hvd.runner.launch.run import run
from spark_hvd.world.env import HOROVOD_DIALECT

_VERBOSITY = {"log_callback_only": 0, "all": 1}


class HorovodRunner:
    """Runs functions written for ``sparkdl.HorovodRunner``; only the import changes.

    Args:
        np: Number of ranks, each in a Spark task; 0 for all task slots; negative for that many processes on this
            machine.
        driver_log_verbosity: "all" shows the ranks' output; "log_callback_only" does not.

    Raises:
        ValueError: ``driver_log_verbosity`` has another value.
        TypeError: ``np`` is not a whole number.
    """

    __module__ = "spark_hvd.compat"

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity not in _VERBOSITY:
            raise ValueError(
                f"driver_log_verbosity={driver_log_verbosity!r}: expected one of {', '.join(map(repr, _VERBOSITY))}"
            )
        if not isinstance(np, int):
            raise TypeError(f"np={np!r}: expected a whole number")
        self.num_processor, self._verbose = np, _VERBOSITY[driver_log_verbosity]

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run ``main(**kwargs)`` on every rank.

        ``main`` may import ``horovod``, which then has Horovod's own numbers: see :mod:`spark_hvd.horovod`.

        Returns:
            The return value of rank 0.

        Raises:
            RunError: As raised by :func:`spark_hvd.run`.
        """
        options: dict[str, Any] = {"kwargs": kwargs, "verbose": self._verbose, "env": HOROVOD_DIALECT}
        if self.num_processor < 0:
            return run_local(main, num_proc=-self.num_processor, **options)[0]
        return run(main, num_proc=self.num_processor or None, **options)[0]
