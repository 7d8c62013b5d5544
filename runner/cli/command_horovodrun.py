"""``horovodrun``: ``spark-hvd run`` in Horovod's dialect, with its options for hosts if they name this machine."""

from __future__ import annotations

import subprocess
from typing import Any

import click

from spark_hvd.runner.cli import check_build_option, run
from spark_hvd.runner.cli.horovodrun import LEVELS
from spark_hvd.runner.compat.horovod import check_hosts

_HOSTS = (
    click.Option(["-H", "--hosts"], metavar="HOST:SLOTS", help="This machine: localhost:4. For others use --master."),
    click.Option(["-hostfile", "--hostfile"], metavar="FILE", help="Lines of `localhost slots=4`, for this machine."),
    click.Option(
        ["--host-discovery-script"], metavar="FILE",
        help="Prints localhost:4; called once, for --max-np. For other hosts use --master.",
    ),
    click.Option(["--log-level"], type=click.Choice(LEVELS, case_sensitive=False), help="What ranks log."),
)  # fmt: skip


def _horovodrun(
    hosts: str | None, hostfile: str | None, host_discovery_script: str | None, log_level: str | None, **values: Any
) -> None:
    """Run a command on N ranks: horovodrun -np 2 python train.py.

    The ranks are processes of this machine, or, with --master, of a Spark cluster. In them `import horovod` finds
    spark_hvd's modules, with Horovod's numbers and errors.
    """
    given = [name for name in (hosts, hostfile, host_discovery_script) if name is not None]
    if len(given) > 1:
        raise click.UsageError("expected one of -H, --hostfile and --host-discovery-script")
    if given and values["master"] is not None:
        raise click.UsageError("--master: Spark decides on which hosts ranks run. Leave -H and similar options out.")
    listed = hosts if hosts is not None else _listed(hostfile, host_discovery_script)
    try:
        slots = check_hosts(listed, values["num_proc"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if host_discovery_script is not None:
        values["max_num_proc"] = values["max_num_proc"] or slots
    if log_level is not None:
        values["env"] = {"HOROVOD_LOG_LEVEL": log_level.lower(), **values["env"]}
    assert run.callback is not None
    run.callback(**{**values, "horovod": True})


def _listed(hostfile: str | None, script: str | None) -> str | None:
    """Read the hosts from a file or a script's output, in the form of -H."""
    try:
        if hostfile is not None:
            with open(hostfile) as file:
                lines = [line.split("#")[0].split() for line in file]
            return ",".join(
                ":".join([words[0], *(word.removeprefix("slots=") for word in words[1:2])]) for words in lines if words
            )
        if script is not None:
            done = subprocess.run(script, shell=True, capture_output=True, text=True, check=True, timeout=60)
            return ",".join(done.stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        raise click.UsageError(f"{hostfile or script}: {error}. Expected lines such as localhost:4") from error
    return None


_own = {name for option in _HOSTS for name in option.opts} | {"--horovod"}
main = click.Command(
    "horovodrun",
    context_settings=run.context_settings,
    params=[*_HOSTS, check_build_option(), *(each for each in run.params if not _own & set(each.opts))],
    callback=_horovodrun,
    help=_horovodrun.__doc__,
)
