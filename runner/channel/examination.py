"""The result of examining a rank's process, as a message between task and driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of an examination.

    Attributes:
        cpu: Cores used by the rank and its child processes, over a second: 1.0 is one core.
        status: Status of its process in psutil's words: "running", "sleeping", "stopped", "disk-sleep" ...
        stacks: The Python stacks of its threads; empty if it wrote none, for example because it is stopped.
    """

    cpu: float
    status: str
    stacks: str
