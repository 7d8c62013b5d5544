"""What a process that ends owes MPI. It can be asked without loading MPI, which may not be there."""

from __future__ import annotations

from collections.abc import Callable

at_exit: list[Callable[[], None]] = []
"""What a process that ends calls when it has left its world: the end of MPI, once that is loaded."""
