"""``FaultPlan``: makes chosen ranks fail at chosen steps, to rehearse a job's recovery.

    def train(faults):  # a plan travels with fn, as an argument of it
        ...
        while state.step < 100:
            faults.at(state.step)
            ...

A fault is keyed by generation, rank and step, so that it strikes once: what follows it is another generation.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = ("kill", "stop", "raise", "segfault", "exit", "partition", "notice")
"""What can happen to a rank; see the methods of :class:`FaultPlan`."""

_log = logging.getLogger(__name__)


class InjectedFaultError(Exception):
    """The exception that :meth:`FaultPlan.raises` raises by default."""

    def __reduce__(self) -> tuple[type[InjectedFaultError], tuple[Any, ...]]:
        return type(self), self.args


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan.

    Attributes:
        kind: One of :data:`KINDS`.
        rank: The rank that fails; for a random fault, modulo the number of ranks.
        step: The step, as given to :meth:`FaultPlan.at`; for a random fault, the number of steps of the generation.
        generation: The generation; None for each.
        error: For "raise": the class of the exception.
        message: For "raise": its text.
        code: For "exit": the exit code.
        counted: Whether `step` counts calls of :meth:`FaultPlan.at` in the generation.
    """

    kind: str
    rank: int
    step: int
    generation: int | None = 0
    error: type[Exception] = InjectedFaultError
    message: str = "on purpose"
    code: int = 1
    counted: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}")
        _require_count("rank", self.rank)
        _require_count("step", self.step)
        if self.generation is not None:
            _require_count("generation", self.generation, ", or None for every generation")
        if not (isinstance(self.error, type) and issubclass(self.error, Exception)):
            raise TypeError(f"error={self.error!r}: expected a class of exceptions, such as ValueError")
        _require_count("code", self.code)
        if self.code > 255:
            raise ValueError(f"code={self.code}: expected an exit code, 0 to 255")

    def strike(self) -> None:
        """Let it happen to this process, now."""
        sys.stdout.flush()
        sys.stderr.flush()
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "notice":
                os.kill(os.getpid(), signal.SIGTERM)
            case "exit":
                os._exit(self.code)
            case "raise":
                raise self.error(self.message)
            case "segfault":
                import ctypes

                ctypes.string_at(0)
            case "partition":
                from spark_hvd.transport.connections import cut_among, sockets

                cut_among(sockets())


def _require_count(name: str, value: object, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected a whole number, 0 or more{otherwise}")
    if value < 0:
        raise ValueError(f"{name}={value}: expected 0 or more{otherwise}")


class _Progress:
    """The steps that this process has made in the present generation; a copy restarts.

    What was planned for it and did not happen is said when the generation is over, and when the process ends.
    """

    def __init__(self) -> None:
        self.generation = -1
        self.rank = self.size = 0
        self.made = 0
        self.first = self.last = 0
        """Steps, by the numbers that they were given."""
        self.struck: set[Fault] = set()

    def begin(self, plan: FaultPlan, generation: int, rank: int, size: int) -> None:
        if self.generation < 0:
            atexit.register(self._end, plan, os.getpid())
        else:
            self._tell(plan)
        self.generation, self.rank, self.size, self.made = generation, rank, size, 0

    def note(self, step: int) -> None:
        self.first, self.last = self.first if self.made else step, step
        self.made += 1

    def _end(self, plan: FaultPlan, process: int) -> None:
        if os.getpid() == process:  # and no fork of it
            self._tell(plan)
            later = [each for each in plan.faults if (each.generation or 0) > self.generation]
            if later and self.rank == 0:
                self._missed(later[0], f"generation {self.generation} was the last")
                if len(later) > 1:
                    _log.warning("%d more faults of later generations never struck", len(later) - 1)

    def _tell(self, plan: FaultPlan) -> None:
        for fault in plan.faults:
            if fault.generation == self.generation and fault not in self.struck:
                rank = fault.rank % self.size if fault.counted else fault.rank
                if rank == self.rank:
                    self._missed(fault, f"its steps there were {self.first} to {self.last}")
                elif self.rank == 0 and rank >= self.size:
                    self._missed(fault, f"there was no such rank among {self.size}")

    def _missed(self, fault: Fault, why: str) -> None:
        _log.warning(
            "rank %d, generation %d, step %d: %s was planned and never struck: %s",
            *(fault.rank, fault.generation, fault.step, fault.kind, why),
        )

    def __reduce__(self) -> tuple[type[_Progress], tuple[()]]:
        return type(self), ()


@dataclass(frozen=True)
class FaultPlan:
    """Makes chosen ranks fail at chosen steps, to rehearse a job's recovery.

    Pass the plan to fn as an argument, and call :meth:`at` before each step. A plan is immutable; each method that adds
    a fault returns a new plan. A fault strikes once, in one generation::

        faults = FaultPlan().kill(rank=1, step=30).raises(rank=0, step=50, generation=1)

    In a static run the generation is the number of the restart, see ``max_restarts`` of :func:`spark_hvd.run`.

    Attributes:
        faults: The faults of the plan.
    """

    faults: tuple[Fault, ...] = ()
    _progress: _Progress = field(default_factory=_Progress, init=False, repr=False, compare=False)

    def kill(self, rank: int, step: int, generation: int | None = 0) -> FaultPlan:
        """Kill the rank's process (SIGKILL), as the kernel does if memory is short.

        Args:
            rank: The rank that fails.
            step: The step, as given to :meth:`at`.
            generation: The value of ``hvd.generation()``; None for every generation that reaches the step.

        Raises:
            TypeError, ValueError: An argument is not a whole number from 0. The same holds for all faults.
        """
        return self._and(Fault("kill", rank, step, generation))

    def stop(self, rank: int, step: int, generation: int | None = 0) -> FaultPlan:
        """Stop the rank's process (SIGSTOP), with its connections open, so that it hangs."""
        return self._and(Fault("stop", rank, step, generation))

    def raises(
        self,
        rank: int,
        step: int,
        generation: int | None = 0,
        *,
        error: type[Exception] = InjectedFaultError,
        message: str = "on purpose",
    ) -> FaultPlan:
        """Raise ``error(message)`` in the call of :meth:`at`."""
        return self._and(Fault("raise", rank, step, generation, error, message))

    def segfault(self, rank: int, step: int, generation: int | None = 0) -> FaultPlan:
        """Crash the rank's process in native code, by a segmentation fault."""
        return self._and(Fault("segfault", rank, step, generation))

    def exit(self, rank: int, step: int, generation: int | None = 0, *, code: int = 1) -> FaultPlan:
        """Let the rank's process exit at once with a code, as by ``os._exit``."""
        return self._and(Fault("exit", rank, step, generation, code=code))

    def partition(self, rank: int, step: int, generation: int | None = 0) -> FaultPlan:
        """Cut all TCP connections of the rank's process, in both directions. The process continues.

        Other connections stay: shared memory, InfiniBand, NVLink.
        """
        return self._and(Fault("partition", rank, step, generation))

    def notice(self, rank: int, step: int, generation: int | None = 0) -> FaultPlan:
        """Send the rank SIGTERM, as a notice that its machine will go. It ends a program that does not handle it."""
        return self._and(Fault("notice", rank, step, generation))

    @classmethod
    def random(
        cls, seed: int, count: int, kinds: Sequence[str] = KINDS, *, size: int, max_step: int = 20, min_step: int = 1
    ) -> FaultPlan:
        """Add a random fault in each of the generations 0 to `count` - 1.

        `seed` and the generation alone decide the kind, the rank, and the number of steps before the fault. Steps are
        counted by the calls of :meth:`at`, regardless of the numbers passed to it.

        Args:
            seed: Seed of the faults.
            count: Number of faults.
            kinds: Kinds to choose from.
            size: Number of ranks to choose from; modulo the actual number if there are fewer.
            max_step: Maximum number of steps of a generation before its fault.
            min_step: Minimum number. Leave time for a commit: a run ends if ranks keep failing before one.

        Raises:
            TypeError, ValueError: An argument is wrong.
        """
        for name, value in (("count", count), ("size", size), ("max_step", max_step), ("min_step", min_step)):
            _require_count(name, value)
        if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds={kinds!r}: expected a list of some of {', '.join(KINDS)}")
        if size < 1:
            raise ValueError(f"size={size}: expected at least 1 rank")
        if min_step > max_step:
            raise ValueError(f"min_step={min_step}, max_step={max_step}: expected min_step <= max_step")
        faults = []
        for generation in range(count):
            chance = random.Random(f"{seed}/{generation}")
            kind, rank = chance.choice(list(kinds)), chance.randrange(size)
            faults.append(Fault(kind, rank, chance.randint(min_step, max_step), generation, counted=True))
        return cls(tuple(faults))

    def at(self, step: int) -> None:
        """Let the faults planned for this rank and step happen. Costs next to nothing if there are none.

        Args:
            step: The number of the step that is about to begin.

        Raises:
            NotInitializedError: Before ``hvd.init()``.
            Exception: The one that :meth:`raises` was given.
        """
        if not self.faults:
            return
        from spark_hvd.context import basics  # the driver makes a plan without torch

        generation = basics.generation()
        progress = self._progress
        if progress.generation != generation:
            progress.begin(self, generation, basics.rank(), basics.size())
        made = progress.made
        progress.note(step)
        for fault in self.faults:
            if fault.step != (made if fault.counted else step) or fault.generation not in (generation, None):
                continue
            rank = fault.rank % basics.size() if fault.counted else fault.rank
            if rank == basics.rank():
                _log.warning("rank %d, generation %d, step %d: %s, as planned", rank, generation, step, fault.kind)
                progress.struck.add(fault)
                fault.strike()

    def _and(self, fault: Fault) -> FaultPlan:
        return replace(self, faults=(*self.faults, fault))
