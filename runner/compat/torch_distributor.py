"""PySpark's TorchDistributor: its constructor and its ``run``, on ranks that :func:`spark_hvd.run` starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.compat.in_rank import ROWS, run_file, run_function
from spark_hvd.runner.launch.local import run_local
from spark_hvd.runner.launch.run import run
from spark_hvd.runner.outcome.payload import name_of, renamed
from spark_hvd.runner.rank.script import Script
from spark_hvd.runner.spark.session import active_session, conf, is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_TASK_GPUS, _DRIVER_GPUS = "spark.task.resource.gpu.amount", "spark.driver.resource.gpu.amount"
_TLS, _IGNORE_TLS = "spark.ssl.enabled", "pytorch.spark.distributor.ignoreSsl"


class TorchDistributor:
    """Runs functions and files written for ``pyspark.ml.torch.distributor.TorchDistributor``; only the import changes.

    A rank gets torchrun's environment, but no process group: the function creates one by
    ``torch.distributed.init_process_group``, or calls ``hvd.init()``.

    Args:
        num_processes: Number of ranks.
        local_mode: Run the ranks as processes of this machine instead of in Spark tasks.
        use_gpu: Give each rank a GPU: one of its Spark task (``spark.task.resource.gpu.amount``), or in local mode one
            of the driver (``spark.driver.resource.gpu.amount``). Otherwise, ranks in tasks see no GPU.

    Raises:
        ValueError: ``num_processes`` is less than 1.
        RuntimeError: GPUs are requested, but Spark's settings provide none.
        ClusterError: A Spark session is needed, but there is none.
    """

    __module__ = "spark_hvd.compat"

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}: expected a positive integer")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self._each, self._visible = 1, ""
        if use_gpu and local_mode:
            self._take_gpus_of_driver()
        elif use_gpu:
            self._each = self._gpus_of_task()

    @property
    def num_tasks(self) -> int:
        """Number of Spark tasks, or of processes in local mode."""
        return self.num_processes // self._each

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function, or a Python file, on every rank.

        Args:
            train_object: The function, or the path of a file on this machine, which every rank runs as ``__main__``.
            args: Arguments of the function, or of the command line as text.
            kwargs: Keyword arguments of the function.

        Returns:
            The function's return value on rank 0; None for a file.

        Raises:
            ValueError: ``kwargs`` are given with a file.
            OSError, SyntaxError: The file cannot be read, or is not Python.
            RuntimeError: ``spark.ssl.enabled`` is set, but tensors would be sent unencrypted.
            RunError: As raised by :func:`spark_hvd.run`; also a RuntimeError.
        """
        if callable(train_object):
            return self._start(run_function, train_object, (train_object, args, kwargs, self.local_mode))
        if kwargs:
            raise ValueError(f"{next(iter(kwargs))}=...: a file takes arguments of a command line, not keywords")
        script = Script.read(train_object, [str(argument) for argument in args])
        return self._start(run_file, os.path.basename(train_object), (script, self.local_mode))

    def train_on_dataframe(
        self, train_function: Callable[..., Any], spark_dataframe: DataFrame, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function whose ranks read a DataFrame's rows by :func:`get_spark_partition_data_loader`.

        PySpark's ``_train_on_dataframe`` needs as many partitions as ranks, none of them empty. This method takes any
        partitions.

        Returns:
            The function's return value on rank 0.

        Raises:
            ValueError: In local mode.
            RuntimeError, RunError: As raised by :meth:`run`.
        """
        if self.local_mode:
            raise ValueError("local_mode=True: expected local_mode=False, because Spark tasks have the rows")
        call = (train_function, args, kwargs, False, ROWS)
        return self._start(run_function, train_function, call, data={ROWS: spark_dataframe})

    _train_on_dataframe = train_on_dataframe

    def _start(
        self, in_rank: Callable[..., Any], named: Callable[..., Any] | str, args: tuple[Any, ...], **options: Any
    ) -> Any:
        function = renamed(in_rank, named if isinstance(named, str) else name_of(named))
        if self.local_mode:
            env = {"CUDA_VISIBLE_DEVICES": self._visible} if self._visible else {}
            return run_local(function, args, num_proc=self.num_processes, env=env, **options)[0]
        self._check_encryption()
        if not self.use_gpu:
            options["gpus_per_proc"] = 0
        return run(function, args, num_proc=self.num_processes, procs_per_task=self._each, **options)[0]

    def _check_encryption(self) -> None:
        """Refuse to run if the cluster's settings require encryption.

        Raises:
            RuntimeError: TLS is on, and not ignored.
        """
        if not _is_true(_TLS):
            return
        text = f"{_TLS}=true: this cluster's traffic has TLS encryption, but tensors between ranks have none"
        if not _is_true(_IGNORE_TLS):
            raise RuntimeError(f"{text}. If that is acceptable, set {_IGNORE_TLS} to true")
        _log.warning("%s (%s=true)", text, _IGNORE_TLS)

    def _gpus_of_task(self) -> int:
        """Return the number of GPUs of a task, which is also its number of ranks.

        Raises:
            RuntimeError: A task has no GPU, or the number of ranks is not a multiple of its GPUs.
        """
        each = int(_setting(_TASK_GPUS) or 0)
        if each < 1:
            raise RuntimeError(f"use_gpu=True, but {_TASK_GPUS} is unset: set it, or use_gpu=False")
        if self.num_processes % each:
            raise RuntimeError(
                f"num_processes={self.num_processes} with {_TASK_GPUS}={each}: expected a multiple of {each}, because "
                "each task has a rank for each of its GPUs"
            )
        return each

    def _take_gpus_of_driver(self) -> None:
        """Choose the driver's GPUs for the ranks, and reduce the number of ranks if there are fewer GPUs.

        Raises:
            RuntimeError: The driver has no GPUs.
        """
        gpus = int(_setting(_DRIVER_GPUS) or 0)
        if gpus < 1:
            raise RuntimeError(
                f"use_gpu=True in local mode, but the driver has no GPUs: {_DRIVER_GPUS} is unset. Set it, or "
                "use_gpu=False"
            )
        if self.num_processes > gpus:
            _log.warning("num_processes=%d, but %s=%d: %d ranks", self.num_processes, _DRIVER_GPUS, gpus, gpus)
            self.num_processes = gpus
        self._visible = ",".join(_gpus_owned()[: self.num_processes])


def _setting(key: str) -> str | None:
    return conf(active_session(None), key)


def _is_true(key: str) -> bool:
    return (_setting(key) or "").lower() == "true"


def _gpus_owned() -> list[str]:
    """Return the GPUs that the driver sees, or that Spark found; none for a Spark Connect client."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    session = active_session(None)
    return [] if is_connect(session) else list(session.sparkContext.resources["gpu"].addresses)
