"""The command line: ``spark-hvd run``, ``spark-hvd doctor``, ``spark-hvd check-build``.

May import every room of the runner. Door: main.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

import spark_hvd
from spark_hvd.runner.cli import session as cli_session
from spark_hvd.runner.cli.horovodrun import refused_options, tuning_env, tuning_options
from spark_hvd.runner.cli.options import check_taken, data_sets, is_elastic, listed, pairs, run_options, variables
from spark_hvd.runner.config import HERE, RunConfig
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.launch.arguments import folded
from spark_hvd.runner.options import options_of
from spark_hvd.runner.outcome.errors import RankFailedError, RunError
from spark_hvd.runner.outcome.payload import renamed
from spark_hvd.runner.rank.script import Script, ScriptExitError, run_script
from spark_hvd.world.env import HOROVOD_DIALECT

_INTERRUPTED = 130
_FACES = {"spark_hvd.torch", "spark_hvd.tensorflow", "spark_hvd.keras", "spark_hvd.mxnet", "spark_hvd.jax"}
_OPTIONS = {**options_of(RunConfig), **options_of(ElasticConfig)}
_OURS = {"env", "verbose", *HERE}
"""Options of the functions that the command line lacks or declares itself."""
_HELP = {"help_option_names": ["-h", "--help"]}


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends the ranks like Ctrl-C."""


def _build(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        _check_build()
        context.exit()


_master = click.option("--master", metavar="URL", help="Spark master: spark://host:7077, yarn, k8s://..., local[4].")
_conf = click.option("--conf", multiple=True, callback=pairs, metavar="KEY=VALUE", help="A setting of Spark.")


def check_build_option() -> click.Option:
    """Return the option that Horovod has instead of a command."""
    return click.Option(
        ["-cb", "--check-build"], is_flag=True, is_eager=True, expose_value=False, callback=_build,
        help="Show what is available, then exit.",
    )  # fmt: skip


@click.group(context_settings=_HELP, params=[check_build_option()])
@click.version_option(spark_hvd.__version__, "-v", "--version", prog_name="spark-hvd")
def main() -> None:
    """Distributed deep-learning training on Apache Spark."""


@main.command("check-build", context_settings=_HELP)
def check_build_command() -> None:
    """Show which frameworks, transports and parts of Spark are available here."""
    _check_build()


def _check_build() -> None:
    from spark_hvd.runner.diagnosis.build import check_build

    click.echo(check_build())


@main.command(context_settings=_HELP)
@_master
@_conf
@click.option("--store", metavar="URL", help="An estimator's store; every host writes to it and reads from it.")
@run_options(
    RunConfig, ["num_proc", "backend", "procs_per_task", "cpus_per_proc", "gpus_per_proc", "interfaces", "ports"]
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(master: str | None, num_proc: int | None, conf: dict[str, str], as_json: bool, **options: Any) -> None:
    """Examine whether a run of N ranks will work on this cluster, and if not, say why.

    Without --master, and outside of spark-submit, it examines this machine. The exit code is 0 without errors, else 1.
    """
    from spark_hvd.runner.diagnosis.examine import doctor as examine

    if master is None and not cli_session.is_submitted():
        master = f"local[{num_proc or 2}]"
    _check_multiple(num_proc, options["procs_per_task"])
    with _ending_well(), cli_session.session(master, conf, "spark-hvd doctor") as spark:
        report = examine(spark, num_proc, **folded(options))
    click.echo(report.to_json() if as_json else str(report))
    sys.exit(0 if report.ok else 1)


@main.command(context_settings={**_HELP, "allow_interspersed_args": False})
@_master
@_conf
@run_options(RunConfig, [name for name in options_of(RunConfig) if name not in _OURS])
@run_options(ElasticConfig, [name for name in _OPTIONS if name not in options_of(RunConfig)])
@click.option("--gloo", "controller", flag_value="gloo", help="The same as --backend gloo.")
@click.option("--mpi", "controller", flag_value="mpi", help="The same as --backend mpi.")
@click.option(
    "--env", multiple=True, callback=variables, metavar="NAME[=VALUE]",
    help="A variable of the ranks. Without a VALUE, they get this program's. Every user of this machine can see, in "
    "ps, a VALUE given here.",
)  # fmt: skip
@click.option(
    "--data", multiple=True, callback=data_sets, metavar="NAME=PATH",
    help="Parquet, Delta or Iceberg data that ranks read in place: hvd.get_dataset_shard(NAME) in the script.",
)  # fmt: skip
@click.option("--py-files", callback=listed, metavar="A,B", help=".py and .zip files that the script imports from.")
@click.option("--verbose", is_flag=True, help="Log what spark_hvd does.")
@click.option("--quiet", is_flag=True, help="Do not show what the ranks print.")
@click.option("--horovod", is_flag=True, help="Use Horovod's numbers and errors even if the script does not import it.")
@click.option("-m", "module", is_flag=True, help="The script is the name of a module, as for python -m.")
@tuning_options
@refused_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    master: str | None,
    conf: dict[str, str],
    controller: str | None,
    env: dict[str, str],
    data: dict[str, str],
    py_files: list[str],
    verbose: bool,
    quiet: bool,
    module: bool,
    horovod: bool,
    script: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a Python script on N ranks, each as __main__ with the arguments given.

    With --master, or under spark-submit, the ranks run on a Spark cluster, otherwise as processes on this machine,
    without Java. The exit code is 0, or that of the rank that failed first.

    \b
    spark-hvd run -np 2 train.py --epochs 3
    spark-hvd run -np 8 --master spark://host:7077 --py-files models.py train.py
    """  # noqa: D301 - click does not wrap the lines after this character
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="spark-hvd: %(message)s")
    program = _read_script(script, arguments, module)
    env = {**_dialect(program, horovod), **tuning_env(options), **env}
    given = {name: value for name, value in options.items() if value not in (None, []) and name in _OPTIONS}
    given = {"backend": controller, **given, "env": env, "verbose": 0 if quiet else 1}
    given |= {"data": data} if data else {}
    _check_multiple(given.get("num_proc"), given.get("procs_per_task"))
    with _ending_well():
        if master is None and not cli_session.is_submitted():
            _run_here(program, py_files, given)
        else:
            _run_on_spark(program, py_files, given, master, conf)


def _dialect(program: Script, asked: bool) -> dict[str, str]:
    """Return the variable that gives ranks Horovod's dialect, if the user or the script's imports ask for it."""
    imported = program.imported()
    theirs = {name for name in imported if name.partition(".")[0] == "horovod"}
    ours = imported & _FACES
    if theirs and ours:
        click.echo(
            f"spark-hvd: {os.path.basename(program.name)} imports {min(theirs)} and {min(ours)}. A run has one "
            "dialect, so both use Horovod's numbers and errors (docs/migrating-from-horovod.md).",
            err=True,
        )
    return dict(HOROVOD_DIALECT) if asked or theirs else {}


def _check_multiple(num_proc: int | None, each: int | None) -> None:
    if num_proc is not None and each is not None and num_proc % each:
        raise click.UsageError(f"-np {num_proc} --procs-per-task {each}: expected -np to be a multiple of it.")


def _read_script(script: str, arguments: tuple[str, ...], module: bool) -> Script:
    # Accept `-np 4 python train.py`, too: horovodrun takes a command.
    if not module and re.fullmatch(r"python[\d.]*", os.path.basename(script)):
        rest = [argument for argument in arguments if argument != "-u"]
        module = rest[:1] == ["-m"]
        script, *others = rest[1:] if module else rest or [""]
        arguments = tuple(others)
    if module:
        return Script.module(script, arguments)
    try:
        return Script.read(script, arguments)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"{script}: {getattr(error, 'strerror', None) or error}. Expected a Python script, or a module after -m."
        ) from error
    except SyntaxError as error:
        raise click.ClickException(f"{type(error).__name__} in {script}, line {error.lineno}: {error.msg}") from error


def _run_here(program: Script, py_files: list[str], given: dict[str, Any]) -> None:
    from spark_hvd.runner.elastic.local import run_elastic_local
    from spark_hvd.runner.launch.local import run_local

    start = run_elastic_local if is_elastic(given) else run_local
    check_taken(given, start)
    if "num_proc" not in given:
        raise click.UsageError("-np is missing: how many ranks? (Or give --master, to use every slot of a cluster.)")
    for path in py_files:  # ranks get this process's sys.path
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)) if path.endswith(".py") else os.path.abspath(path))
    start(renamed(run_script, os.path.basename(program.name)), args=(program,), **folded(given))


def _run_on_spark(
    program: Script, py_files: list[str], given: dict[str, Any], master: str | None, conf: Mapping[str, str]
) -> None:
    from spark_hvd.runner.elastic.run import run_elastic
    from spark_hvd.runner.launch.run import run as run_on_cluster

    start = run_elastic if is_elastic(given) else run_on_cluster
    check_taken(given, start)
    name = os.path.basename(program.name)
    with cli_session.session(master, conf, f"spark-hvd run {name}") as spark:
        cli_session.ship(spark, py_files)
        start(renamed(run_script, name), args=(program,), spark=spark, **folded(given))


@contextmanager
def _ending_well() -> Iterator[None]:
    """Turn the exceptions of a run into a message and an exit code, without our own traceback."""

    def terminate(signum: int, frame: FrameType | None) -> NoReturn:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _TerminatedError:
        _leave("terminated; all ranks were stopped", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _leave("interrupted; all ranks were stopped", _INTERRUPTED)
    except RankFailedError as error:
        # The class's name adds nothing to its message.
        text = str(error).replace(f"{ScriptExitError.__module__}.{ScriptExitError.__qualname__}: ", "")
        _leave(text, exit_code_of(error))
    except (RunError, ValueError, TypeError) as error:
        _leave(str(error), 1)
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code_of(error: RankFailedError) -> int:
    """Return the exit code of the rank that failed first: its script's own, 128 + its signal, or 1."""
    if isinstance(error.__cause__, ScriptExitError):
        return error.__cause__.code
    code = error.first.exitcode
    if code is None or code == 0:
        return 1
    return code if code > 0 else 128 - code


def _leave(text: str, code: int) -> NoReturn:
    click.echo(f"spark-hvd: {text}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    # spark-submit runs this file and puts its folder on the path, where modules with common names would shadow others.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main()
