"""The seam between ``hvd.elastic`` and whoever starts ranks: how a rank asks for its next generation.

A generation is one world of ranks, from the moment they meet until one of them is lost or others are taken in. A rank
that survives keeps its process and what it has in memory, and enters the next one.
"""

from __future__ import annotations

from typing import Protocol


class ElasticLauncher(Protocol):
    """One rank's way to its launcher. Called in the thread that trains."""

    update_wanted: bool
    """Whether the members are to change at the next commit: ranks wait to be taken in, or one has to leave."""
    world_failure: str | None
    """Why the present generation cannot go on, as far as the launcher knows; None while it can."""

    def enter(self) -> None:
        """Wait until this rank is a member of a new generation, and join that generation's world.

        To be called outside a world. A rank that is not wanted any more does not return from this: its process ends in
        order.

        Raises:
            CollectiveError: The generation broke before all had joined; to be called again.
        """

    def broken(self, error: str) -> None:
        """Tell that collectives of the present generation have failed here, and how."""

    def yielded(self) -> None:
        """Tell that this rank has left the present generation in order, because an update was wanted."""

    def committed(self, commits: int) -> None:
        """Tell how many commits the state of this rank has behind it."""

    def finished(self) -> bool:
        """Tell that the elastic function has returned here, and wait for the other ranks.

        Returns:
            True when it has returned on all ranks; False when the generation is over before that, so that this rank is
            to restore its last commit and to enter the next one.
        """


_installed: ElasticLauncher | None = None


def install(launcher: ElasticLauncher | None) -> None:
    """Make this process an elastic rank; launchers call it before the user's function."""
    global _installed
    _installed = launcher


def installed() -> ElasticLauncher | None:
    """The launcher of this rank; None where ranks are not elastic."""
    return _installed
