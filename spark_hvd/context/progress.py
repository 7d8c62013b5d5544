"""``hvd.progress``: a loop that reports its progress, its metrics, and the time it waits for data.

The loop itself sends nothing; the thread that observes the rank reads its state. A step costs two readings of the clock
and a few additions. Tensors are kept as metrics and read only when their value is needed, so no step waits for a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from spark_hvd.world.activity import activity

_log = logging.getLogger("spark_hvd")
T = TypeVar("T")
_END = object()
Metric = float | int | torch.Tensor | Callable[[], Any]


class Progress(Generic[T]):
    """The result of :func:`progress`. Iterate over it, or call :meth:`step` after each step.

    Attributes:
        done: Number of steps done.
    """

    def __init__(
        self,
        items: Iterable[T] | None,
        steps: int | None,
        *,
        stage: str,
        epoch: int | None,
        epochs: int | None,
        samples: int | None,
        metrics: Mapping[str, Metric],
        initial: int = 0,
    ) -> None:
        self._items = items
        self._steps = steps
        self._stage = stage
        self._epoch, self._epochs = epoch, epochs
        self._samples_each = samples
        self._metrics: dict[str, Metric] = {}
        self.done = initial
        activity.end_loop(epoch)
        before = activity.progress
        # Totals continue from loop to loop, so that observers can take differences.
        self._totals = _Totals(activity.optimizer_steps) if before is None else before.close()
        self._started: float | None = None if items is not None else time.monotonic()
        self._fetching: float | None = None
        self.report(**metrics)
        activity.progress = self

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("the number of steps of this loop is unknown; pass total= to hvd.progress.")
        return self._steps

    @property
    def total_steps(self) -> int:
        """Number of steps in all loops of this process, and of its optimizers before the first loop."""
        return self._totals.steps

    def __iter__(self) -> Iterator[T]:
        """Yield the items, one for each step; a step ends when the next item is requested."""
        if self._items is None:
            raise TypeError(
                "hvd.progress was given a number of steps, so there is nothing to iterate over: call .step() after "
                "each step, or pass the iterable instead."
            )
        self._started = time.monotonic()
        items = iter(self._items)
        try:
            while True:
                with self.fetching():
                    item = next(items, _END)
                if item is _END:
                    return
                yield item  # type: ignore[misc] # it is not _END
                self._count(self._samples_each if self._samples_each is not None else _rows(item))
        finally:
            self.close()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Count the time in this context as waiting for data. Loops that fetch batches themselves use it."""
        self._fetching = before = time.monotonic()
        try:
            yield
        finally:
            self._fetching = None
            if activity.progress is self:
                self._totals.data += time.monotonic() - before

    def step(self, samples: int | None = None, **metrics: Metric) -> None:
        """Count a step as done.

        Args:
            samples: Number of samples of the step; None for `batch_size`.
            metrics: As for :meth:`report`.
        """
        if self._items is not None:
            raise TypeError("this loop counts a step for each item itself: call .report(loss=...) instead of .step().")
        self._count(self._samples_each or 0 if samples is None else samples)
        if metrics:
            self.report(**metrics)
        if self.done == self._steps:
            self.close()

    def report(self, /, **metrics: Metric) -> None:
        """Report the latest values of metrics.

        Args:
            metrics: Numbers, tensors of one element, or functions without arguments that return one. Tensors are
                neither copied nor read here, so that a step does not wait for a GPU.

        Raises:
            ValueError: A tensor has several elements.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"{name}: a tensor of shape {tuple(value.shape)}; hvd.progress shows single numbers, so pass "
                        f"{name}=value.mean(), for example."
                    )
                value = value.detach()
            self._metrics[name] = value

    def _count(self, samples: int) -> None:
        self.done += 1
        if activity.progress is self:  # otherwise, a loop inside this one has counted the step
            self._totals.steps += 1
            self._totals.samples += samples
            if activity.at_step is not None:
                activity.at_step()

    def close(self) -> _Totals:
        """End the loop, and keep its last values. The end of an iteration calls this."""
        if self._started is not None:
            self._totals.seconds += time.monotonic() - self._started
            self._started = None
        return self._totals

    def facts(self, now: float) -> dict[str, Any]:
        """Return the fields of :class:`spark_hvd.world.vitals.Vitals` for this loop. Any thread may call this."""
        totals, started, fetching = self._totals, self._started, self._fetching
        fetched = 0.0 if fetching is None else now - fetching
        return {
            "stage": self._stage,
            "epoch": self._epoch,
            "epochs": self._epochs,
            "step": self.done,
            "steps": self._steps,
            "total_steps": totals.steps,
            "samples": totals.samples,
            "watched_seconds": totals.seconds + (0.0 if started is None else now - started),
            "data_seconds": totals.data + fetched,
            "fetching": None if fetching is None else fetched,
            "metrics": {
                name: number for name, value in list(self._metrics.items()) if (number := _number(value)) is not None
            },
        }


class _Totals:
    """The counts of all loops of this process, and of the optimizers before the first. They never decrease."""

    __slots__ = ("data", "samples", "seconds", "steps")

    def __init__(self, steps: int) -> None:
        self.steps, self.samples = steps, 0
        self.seconds = self.data = 0.0


def progress(
    work: Iterable[T] | int | None = None,
    *,
    total: int | None = None,
    initial: int = 0,
    epoch: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    stage: str = "train",
    **metrics: Metric,
) -> Progress[T]:
    """Report the progress of this rank to the driver.

    Iterate over it, as in ``for batch in hvd.progress(loader, epoch=epoch, epochs=10):``, and call its
    ``report(loss=loss)`` for new values. Or count steps yourself: ``bar = hvd.progress(1000)``, then
    ``bar.step(loss=loss, samples=len(batch))`` after each step. Of nested loops, the innermost one counts.

    Args:
        work: An iterable, such as a DataLoader, or the number of steps; None if that is not known.
        total: Number of steps, if `work` has no length.
        initial: Number of these steps done before, if a run resumes within them.
        epoch: Number of this epoch, from 0.
        epochs: Total number of epochs.
        batch_size: Samples of each step on this rank. None: the length of the first tensor or array in a batch.
        stage: Name of this loop, such as "train" or "validation".
        metrics: First values, as for :meth:`Progress.report`; a function is called whenever its value is needed.

    Returns:
        The loop. If nobody watches, as under torchrun, it only counts.

    Raises:
        ValueError: A number is negative.
        TypeError: `work` is neither a number nor an iterable.
    """
    items: Iterable[T] | None = None
    if isinstance(work, int):
        if total is not None and total != work:
            raise ValueError(f"hvd.progress({work}, total={total}): two numbers of steps; pass one of them.")
        total = work
    elif work is not None:
        if not isinstance(work, Iterable):
            raise TypeError(f"hvd.progress({work!r}): expected an iterable, or a number of steps.")
        items = work
        if total is None and isinstance(work, Sized):
            total = _length(work)
    for name, number in (
        ("total", total),
        ("initial", initial),
        ("epoch", epoch),
        ("epochs", epochs),
        ("batch_size", batch_size),
    ):
        if number is not None and number < 0:
            raise ValueError(f"{name}={number}: expected a number from 0.")
    if total is not None and initial > total:
        raise ValueError(f"initial={initial}, total={total}: expected at most the total, which includes them.")
    return Progress(
        items, total, stage=stage, epoch=epoch, epochs=epochs, samples=batch_size, metrics=metrics, initial=initial
    )


def _length(work: Sized) -> int | None:
    try:
        return len(work)
    except TypeError:  # the class DataLoader has a length, but not one over an iterable dataset
        return None


def _rows(batch: Any) -> int:
    """Return how many samples a batch has: the length of the first tensor or array in it; 0 if there is none."""
    while isinstance(batch, (list, tuple, Mapping)):
        if not batch:
            return 0
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 0


def _number(value: Metric) -> float | None:
    """Return the value of a metric now; None if it has none."""
    try:
        return float(value() if callable(value) else value)
    except Exception as error:  # the user's function may run while its data change
        _log.debug("a metric of hvd.progress cannot be read: %s", error)
        return None
