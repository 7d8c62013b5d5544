"""The interface between ``hvd.elastic`` and launchers: how a rank asks for its next generation.

A generation is one world of ranks, from the moment they meet until one is lost or new ones join. A rank that survives
keeps its process and its memory, and enters the next generation.
"""

from __future__ import annotations

from typing import Protocol


class ElasticLauncher(Protocol):
    """A rank's connection to its launcher. The training thread calls it."""

    update_wanted: bool
    """Whether the members change at the next commit: new ranks wait to join, or a rank must leave."""
    world_failure: str | None
    """Why the present generation cannot continue, as far as the launcher knows; None while it can."""

    def enter(self) -> None:
        """Wait until this rank is a member of a new generation, and join that generation's world.

        Call it outside a world. If the rank is no longer wanted, this does not return: the process ends normally.

        Raises:
            CollectiveError: The generation broke before all ranks had joined; call this again.
        """

    def broken(self, error: str) -> None:
        """Report that collectives of the present generation have failed here, and how."""

    def yielded(self) -> None:
        """Report that this rank has left the present generation normally, because an update was wanted."""

    def committed(self, commits: int) -> None:
        """Report how many commits this rank's state contains."""

    def finished(self) -> bool:
        """Report that the elastic function has returned here, and wait for the other ranks.

        Returns:
            True once it has returned on all ranks; False if the generation ended before that, in which case this rank
            must restore its last commit and enter the next generation.
        """


_installed: ElasticLauncher | None = None


def install(launcher: ElasticLauncher | None) -> None:
    """Make this process an elastic rank; launchers call it before the user's function."""
    global _installed
    _installed = launcher


def installed() -> ElasticLauncher | None:
    """Return the launcher of this rank; None if ranks are not elastic."""
    return _installed
