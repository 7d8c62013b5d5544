"""What a process that ends must do for MPI. Importing this does not load MPI, which may not be installed."""

from __future__ import annotations

from collections.abc import Callable

at_exit: list[Callable[[], None]] = []
"""Called by a process that ends, once it has left its world: ends MPI, if that is loaded."""
