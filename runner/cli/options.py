"""The options that the commands share with the functions they call, generated from the functions' declarations."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from spark_hvd.runner.config import GROUPS, CommonConfig, RunConfig
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.options import Option, options_of

_FLAGS = {
    "num_proc": ("-np", "--num-proc"),
    "mpi": ("--mpi-library",),
    "interfaces": ("--network-interfaces", "--interfaces"),
    "min_num_proc": ("--min-np", "--min-num-proc"),
    "max_num_proc": ("--max-np", "--max-num-proc"),
    "cooldown_range": ("--blacklist-cooldown-range",),
}
"""Flags that differ from the option's name, mostly horovodrun's. Errors name the last of each."""

_ABOVE_0 = click.FloatRange(min=0, min_open=True)
_ELASTIC = options_of(ElasticConfig).keys() - options_of(RunConfig).keys() | {"min_num_proc"}


def pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts into a dict; a click callback."""
    wrong = [value for value in values if not value.partition("=")[1] or value.startswith("=")]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r}: expected NAME=VALUE")
    return {name: text for name, _, text in (value.partition("=") for value in values)}


def data_sets(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse NAME=PATH texts into a dict, and refuse a repeated name; a click callback."""
    wrong = [value for value in values if not all(value.partition("="))]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r}: expected NAME=PATH, such as train=s3://bucket/train")
    names = [value.partition("=")[0] for value in values]
    if twice := [name for name in names if names.count(name) > 1]:
        raise click.BadParameter(
            f"{twice[0]!r} is given twice: expected one path for a name; a folder may hold many files"
        )
    return pairs(context, parameter, values)


def variables(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts into a dict, taking NAME alone from this program's environment; a click callback."""
    unset = [value for value in values if "=" not in value and value not in os.environ]
    if unset:
        raise click.BadParameter(f"{unset[0]!r}: expected NAME=VALUE, or the name of a variable that is set here")
    complete = [value if "=" in value else f"{value}={os.environ[value]}" for value in values]
    return pairs(context, parameter, complete)


def listed(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    """Split A,B at its commas; a click callback."""
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def run_options(config: type[CommonConfig], names: Iterable[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add options that ``config`` declares to a click command; if not given, they arrive as None or an empty list."""
    declared = options_of(config)

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(list(names)):
            more = _form(name, declared[name])
            command = click.option(*_flags(name), name, help=_help(name, declared[name]), **more)(command)
        return command

    return add


def is_elastic(given: Mapping[str, Any]) -> bool:
    """Tell whether the options ask for an elastic run: one is for elastic runs only, and none is for restarts."""
    return "max_restarts" not in given and not _ELASTIC.isdisjoint(given)


def check_taken(given: dict[str, Any], start: Callable[..., Any]) -> None:
    """Check that ``start`` takes the given options, and remove an option that has no meaning there.

    Raises:
        click.UsageError: ``start`` lacks an option. The text says which runs have it.
    """
    from spark_hvd.runner.elastic.run import run_elastic
    from spark_hvd.runner.launch.run import run

    taken = _options_taken(start)
    elastic = is_elastic(given)
    if "procs_per_task" not in taken and (not elastic or given.get("procs_per_task") == 1):
        given.pop("procs_per_task", None)  # there are no Spark tasks
    for name in given:
        if name in taken or given[name] is None:
            continue
        option = _flags(name)[-1]
        if name in _options_taken(run_elastic if elastic else run):
            raise click.UsageError(f"{option} is for a Spark cluster: name one with --master.")
        if elastic:
            raise click.UsageError(f"{option} is not for elastic runs (--min-np, --max-np).")
        raise click.UsageError(f"{option} is for elastic runs, which need no restarts: leave --max-restarts out.")


def _options_taken(start: Callable[..., Any]) -> set[str]:
    names = set(inspect.signature(start).parameters)
    return names.union(*(options_of(kind) for group, kind in GROUPS.items() if group in names))


def _flags(name: str) -> tuple[str, ...]:
    return _FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def _form(name: str, declared: Option) -> dict[str, Any]:
    """Return the arguments for click: the option's type and its placeholder in the help."""
    if declared.choices:
        return {"type": click.Choice(declared.choices)}
    if declared.least is not None:
        return {"type": click.IntRange(min=declared.least), "metavar": "N"}
    if declared.seconds:
        return {"type": _ABOVE_0, "metavar": "S"}
    if declared.above_0:
        return {"type": _ABOVE_0, "metavar": "X"}
    forms: dict[str, dict[str, Any]] = {
        "interfaces": {"callback": listed, "metavar": "A,B"},
        "page": {"is_flag": True, "default": None},
        "ports": {"metavar": "LOW-HIGH"},
        "cooldown_range": {"nargs": 2, "type": _ABOVE_0, "metavar": "MIN MAX"},
    }
    return forms[name]


def _help(name: str, declared: Option) -> str:
    """Return the option's text, reworded for scripts."""
    if name == "min_num_proc":
        return "Elastic: minimum number of ranks. With --max-restarts: the number that is enough for a restart."
    text = declared.text.replace("`", "").replace(". fn ", ". The script ")
    return re.sub(r"\bfn\b", "the script", text)
