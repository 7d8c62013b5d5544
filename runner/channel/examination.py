"""What a closer look at one rank's process has found, as a message between task and driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Attributes:
        cpu: Processors used by the rank and all that it has started, over a second: 1.0 is one core.
        status: Of its process, in psutil's words: "running", "sleeping", "stopped", "disk-sleep" ...
        stacks: The Python stacks of its threads; empty if it wrote none, as when it is stopped.
    """

    cpu: float
    status: str
    stacks: str
