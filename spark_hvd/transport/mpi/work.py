"""The Work that torch.distributed gets for an MPI operation in flight, with a future of the results for DDP's hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.transport.handles import when_all_done
from spark_hvd.transport.mpi.progress import Operation
from spark_hvd.world.errors import CollectiveError


class MpiWork(dist.Work):
    """Several operations in flight, as one.

    ``timeout`` is the default number of seconds for :meth:`wait`. ``finish`` completes ``outputs`` when all operations
    have ended; None: MPI does.
    """

    def __init__(
        self,
        operations: list[Operation],
        timeout: float,
        outputs: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._operations = operations
        self._timeout = timeout
        self._outputs = outputs
        self._finish = finish
        self._finishing = threading.Lock()  # the remaining work is done once, by the first thread
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the results are complete. A timeout of zero, torch's own default, stands for the group's.

        Raises:
            CollectiveError: It failed, or the time is up.
        """
        seconds = timeout.total_seconds() if timeout else self._timeout
        for operation in self._operations:
            operation.wait(seconds)
        self._complete()
        return True

    def is_completed(self) -> bool:
        """Return whether the results are complete, or the operation failed."""
        if not all([operation.poll() for operation in self._operations]):
            return False
        if self._error() is None:
            self._complete()
        return True

    def is_success(self) -> bool:
        """Return whether the results are complete."""
        return self.is_completed() and self._error() is None

    def exception(self) -> CollectiveError | None:
        """Return the error of the operation; None if it has not failed."""
        error = self._error()
        return None if error is None else CollectiveError(error)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._outputs

    def synchronize(self) -> None:
        """Do the same as :meth:`wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the list of result tensors."""
        if self._future is None:
            devices: list[Any] = sorted({each.device for each in self._outputs if each.is_cuda}, key=str)
            future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
            self._future = future

            def all_are() -> None:
                error = self._error()
                if error is not None:
                    future.set_exception(CollectiveError(error))
                    return
                try:
                    self._complete()
                except Exception as fault:  # nobody but those who wait for the future would see it
                    future.set_exception(fault)
                else:
                    future.set_result(self._outputs)

            when_all_done([operation.when_done for operation in self._operations], all_are)
        return self._future

    def _error(self) -> str | None:
        return next((each.error for each in self._operations if each.done and each.error is not None), None)

    def _complete(self) -> None:
        if self._finish is not None:
            with self._finishing:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
