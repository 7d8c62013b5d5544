"""The options of ``spark-hvd run`` that make a run elastic, under horovodrun's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

_NEVER_ELASTIC = ("mpi", "procs_per_task", "max_restarts")
_NAMES = ("min_num_proc", "max_num_proc", "elastic_timeout", "reset_limit", "cooldown_range")


def elastic_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them to a click command; their values arrive as keyword arguments."""
    seconds = click.FloatRange(min=0, min_open=True)
    for option in (
        click.option(
            "--blacklist-cooldown-range", "cooldown_range", nargs=2, type=seconds, metavar="MIN MAX",
            help="Seconds for which a host where ranks fail gets no new ones; by default for ever.",
        ),
        click.option("--reset-limit", type=click.IntRange(min=0), metavar="N", help="Failures that are survived."),
        click.option("--elastic-timeout", type=seconds, metavar="S", help="Seconds to wait for --min-np ranks."),
        click.option(
            "--max-np", "--max-num-proc", "max_num_proc", type=click.IntRange(min=1), metavar="N",
            help="Elastic: never more ranks.",
        ),
        click.option(
            "--min-np", "--min-num-proc", "min_num_proc", type=click.IntRange(min=1), metavar="N",
            help="Elastic: never fewer ranks. With --max-restarts: enough for a restart.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def is_elastic(options: Mapping[str, Any]) -> bool:
    """Whether these options ask for an elastic run: any of the above do, unless restarts are asked for."""
    return options.get("max_restarts") is None and any(options.get(name) is not None for name in _NAMES)


def elastic_arguments(options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an elastic run.

    Args:
        options: What was given on the command line.
        kwargs: The arguments that a static run would have.

    Raises:
        click.UsageError: there are some among them that an elastic run has no use for.
    """
    refused = [name for name in _NEVER_ELASTIC if kwargs.get(name) not in (None, 1)]
    if refused:
        raise click.UsageError(f"--{refused[0].replace('_', '-')} is not for elastic runs (--min-np, --max-np).")
    common = {name: value for name, value in kwargs.items() if name not in _NEVER_ELASTIC}
    return common | {name: options[name] for name in _NAMES if options.get(name) is not None}


def check_static(options: Mapping[str, Any]) -> None:
    """Refuse what only elastic runs have, in a run with restarts.

    Raises:
        click.UsageError: naming it.
    """
    given = [name for name in _NAMES if name != "min_num_proc" and options.get(name) is not None]
    if given:
        name = "blacklist-cooldown-range" if given[0] == "cooldown_range" else given[0].replace("_", "-")
        raise click.UsageError(f"--{name} is for elastic runs, which need no restarts: leave --max-restarts out.")
