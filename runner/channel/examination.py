"""The result of examining a rank's process, as a message between task and driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of an examination.

    Attributes:
        cpu: Cores used by the rank and its child processes, over a second: 1.0 is one core.
        status: Status of the rank's process, as psutil names it: "running", "sleeping", "stopped", "disk-sleep" ...
        stacks: The Python stacks of the rank's threads; empty if it wrote none, for example because it is stopped.
    """

    cpu: float
    status: str
    stacks: str
