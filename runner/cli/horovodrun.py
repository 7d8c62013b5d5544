"""The options of ``horovodrun``: those that become variables of the ranks, and why the others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class _Tuning:
    """An option that becomes one of Horovod's variables, which the core reads.

    Attributes:
        variable: The name of the variable.
        kind: The type of the option's value; None for a flag.
        meaning: The line in ``--help``.
        text: Converts the value to the variable's text.
    """

    variable: str
    kind: Any
    meaning: str
    text: Callable[[Any], str] = str


def _flag(value: bool) -> str:
    return "1" if value else "0"


TUNING: Mapping[str, _Tuning] = {
    "--fusion-threshold-mb": _Tuning(
        "HOROVOD_FUSION_THRESHOLD", int, "MiB up to which collectives travel together.", lambda mb: str(mb << 20)
    ),
    "--cache-capacity": _Tuning("HOROVOD_CACHE_CAPACITY", int, "Number of names that ranks negotiate by one bit each."),
    "--timeline-filename": _Tuning("HOROVOD_TIMELINE", str, "Record a timeline to this file, on rank 0's host."),
    "--timeline-mark-cycles": _Tuning("HOROVOD_TIMELINE_MARK_CYCLES", None, "Mark rounds of decisions there.", _flag),
    "--hierarchical-allreduce/--no-hierarchical-allreduce": _Tuning(
        "HOROVOD_HIERARCHICAL_ALLREDUCE", None, "Sum in a host's memory first, then between hosts; the default.", _flag
    ),
    "--autotune": _Tuning("HOROVOD_AUTOTUNE", None, "Tune bucket sizes in the first steps.", _flag),
    "--autotune-log-file": _Tuning("HOROVOD_AUTOTUNE_LOG", str, "CSV file of the trials."),
    "--autotune-warmup-samples": _Tuning("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int, "Samples that do not count."),
    "--autotune-steps-per-sample": _Tuning("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int, "Steps per sample."),
    "--autotune-bayes-opt-max-samples": _Tuning("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int, "Maximum of samples."),
    "--no-stall-check": _Tuning("HOROVOD_STALL_CHECK_DISABLE", None, "Do not name ranks that others wait for.", _flag),
    "--stall-check-warning-time-seconds": _Tuning(
        "HOROVOD_STALL_CHECK_TIME_SECONDS", float, "Seconds until a collective that waits names the missing ranks."
    ),
    "--stall-check-shutdown-time-seconds": _Tuning(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", float, "Seconds until such a collective fails; 0 means never."
    ),
}
"""The options that have an effect here."""

_SPARK_PLACES = (
    "Spark decides on which hosts ranks run. Use --master spark://host:7077, yarn or k8s://..., with --conf "
    "spark.executor.instances and spark.executor.cores; without --master, ranks run on this machine."
)
_NO_SSH = "No ssh is used: Spark's executors start the ranks. Leave it out."
_NOT_BOUND = "Ranks are not bound to cores; set --env OMP_NUM_THREADS=n and --conf spark.task.cpus=n."
_ALWAYS = "There is nothing to choose: docs/collectives.md says what happens on one host and between hosts."
_DEFAULT = "This is the default. Leave it out."

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

REFUSED: Mapping[tuple[str, ...], tuple[int, str]] = {
    ("-H", "--hosts"): (1, _SPARK_PLACES),
    ("-hostfile", "--hostfile"): (1, _SPARK_PLACES),
    ("--host-discovery-script",): (1, _SPARK_PLACES),
    ("-p", "--ssh-port"): (1, _NO_SSH),
    ("-i", "--ssh-identity-file"): (1, _NO_SSH),
    ("--slots-per-host", "--slots"): (1, _SPARK_PLACES),
    ("--jsrun",): (0, "There is no jsrun here: use --backend mpi, or --backend gloo."),
    ("--mpi-args",): (1, "MPI is started without mpirun: set its variables by --env, such as --env FI_PROVIDER=tcp."),
    ("--binding-args",): (1, _NOT_BOUND),
    ("--thread-affinity",): (1, _NOT_BOUND),
    ("--tcp",): (0, "Use --env FI_PROVIDER=tcp with --backend mpi."),
    ("--num-nccl-streams",): (1, "torch chooses NCCL's streams. Leave it out."),
    ("--gloo-timeout-seconds",): (1, "Use --start-timeout for connecting, --collective-timeout for collectives."),
    ("--cycle-time-ms",): (1, "There are no cycles here. Leave it out."),
    ("--hierarchical-allgather", "--no-hierarchical-allgather"): (0, _ALWAYS),
    ("--torus-allreduce", "--no-torus-allreduce"): (0, _ALWAYS),
    ("--network-interface",): (1, "Use --interfaces."),
    ("--no-autotune",): (0, _DEFAULT),
    ("--no-timeline-mark-cycles",): (0, _DEFAULT),
    ("--stall-check",): (0, _DEFAULT),
    ("--autotune-gaussian-process-noise",): (1, "The search uses no Gaussian process. Leave it out."),
    ("--mpi-threads-disable", "--no-mpi-threads-disable"): (0, "One thread at a time uses MPI. Leave it out."),
    ("--output-filename",): (1, "Every line begins with its rank: redirect this program's output instead."),
    ("--config-file",): (1, "Put options into a shell script, and settings of Spark into its spark-defaults.conf."),
    ("--disable-cache",): (0, "Nothing is cached between runs. Leave it out."),
    ("-prefix-timestamp", "--prefix-output-with-timestamp"): (
        0,
        "Lines begin with their rank and have no time: pipe this program's output through a tool such as ts.",
    ),
    ("--log-with-timestamp", "--log-without-timestamp"): (0, "Set the format of logging in the script."),
    ("--log-level",): (1, "Use --verbose, or logging in the script."),
}
"""The options that are refused: the number of values that each takes, and what to do instead."""


def tuning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of TUNING to a click command; their values arrive as keyword arguments."""
    for name, tuning in reversed(list(TUNING.items())):
        flag = {"is_flag": True, "default": None} if tuning.kind is None else {"type": tuning.kind}
        command = click.option(name, help=tuning.meaning, **flag)(command)
    return command


def tuning_env(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of the options of TUNING that were given; ``values`` is what click passed."""
    given = {name: values[name.split("/")[0].lstrip("-").replace("-", "_")] for name in TUNING}
    return {TUNING[name].variable: TUNING[name].text(value) for name, value in given.items() if value is not None}


def refused_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add hidden options, each of which raises an error that says what to do instead."""
    for names, (values, reason) in REFUSED.items():
        kind: dict[str, Any] = {"is_flag": True} if values == 0 else {"nargs": values}
        command = click.option(
            *names, hidden=True, expose_value=False, callback=_refuse(names[0], reason), is_eager=True, **kind
        )(command)
    return command


def _refuse(name: str, reason: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            raise click.UsageError(f"{name}: {reason}", context)

    return callback
