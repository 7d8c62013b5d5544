"""The private names of PySpark and of Spark's JVM that we use, in one place to check when Spark changes.

docs/versions.md lists them by version, and tests/spark/test_private_names.py uses each of them. Functions need a
classic session unless they say otherwise: a Spark Connect client cannot reach the JVM.

They ask for Java's classes by ``getattr`` and the full name. For ``jvm.java.lang.System``, py4j would also ask whether
"java" and "java.lang" are classes, and the JVM would look through all of Spark's jars: 3 ms instead of 0.1.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.ml.param import Param, Params
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

CALL_SITE, CALL_STACK = "callSite.short", "callSite.long"
"""Local properties that name the stages a thread starts: org.apache.spark.util.CallSite."""
_MAX_DIRECTORIES = 500  # of one plan's files; to list more takes longer than to write the data again

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def does_not_tell(spark: SparkSession, what: str, lost: str, error: Exception) -> None:
    """Warn, once per process for each ``what``, that Spark did not answer a question as expected.

    These questions have no stable interface. An application that has ended, or that has no record yet, is no reason to
    warn. ``what`` completes "Spark does not tell ..."; ``lost`` is a sentence on what does not work without an answer.
    """
    from py4j.protocol import Py4JNetworkError

    context: Any = spark.sparkContext
    ended = isinstance(error, (Py4JNetworkError, OSError)) or context._jsc is None
    if ended or "NoSuchElementException" in str(error) or what in _warned:
        _log.debug("Spark does not tell %s: %s", what, error)
        return
    _warned.add(what)
    answer = " ".join(str(error).split("\n\tat ")[0].splitlines()[:2])  # without Java's stack
    _log.warning(
        "Spark %s does not tell %s (%s: %s). %s docs/versions.md has the versions that were tried.",
        spark.version,
        what,
        type(error).__name__,
        answer,
        lost,
    )


# -- the application


def java_context(spark: SparkSession) -> Any:
    """Return Scala's SparkContext."""
    context: Any = spark.sparkContext
    return context._jsc.sc()


def is_stopped(spark: SparkSession) -> bool:
    """Tell whether ``stop()`` has ended the application."""
    context: Any = spark.sparkContext
    return context._jsc is None


def temporary_folder(spark: SparkSession) -> str:
    """Return the directory of the driver's temporary files, which Spark deletes when the driver ends."""
    context: Any = spark.sparkContext
    folder: str = context._temp_dir
    return folder


def local_workers(spark: SparkSession) -> tuple[int, dict[str, str], list[str]]:
    """Describe how Python workers start on a local master.

    Returns:
        The process ID of the driver's JVM, the environment of its workers, and the paths that they search for modules
        before the installed ones.
    """
    import psutil
    from pyspark import SparkFiles

    context: Any = spark.sparkContext
    java = context._jvm
    jvm = int(getattr(java, "java.lang.ProcessHandle").current().pid())
    environ = psutil.Process(jvm).environ()
    own = {name: str(value) for name, value in context.environment.items()}
    spark_path = getattr(java, "org.apache.spark.api.python.PythonUtils").sparkPythonPath()
    parts = [spark_path, own.get("PYTHONPATH", ""), environ.get("PYTHONPATH", "")]
    python_path = os.pathsep.join(filter(None, parts))
    always = {"OMP_NUM_THREADS": context.getConf().get("spark.task.cpus", "1"), "PYTHONUNBUFFERED": "YES"}
    shipped = SparkFiles.getRootDirectory()
    files = [os.path.join(shipped, name) for name in reversed(context._python_includes)]
    path = [getattr(java, "java.lang.System").getProperty("user.dir"), *files, shipped, *python_path.split(os.pathsep)]
    return jvm, {**environ, **always, **own, "PYTHONPATH": python_path}, path


def heap_and_result_limit(spark: SparkSession) -> tuple[int, int]:
    """Return the size of the driver's Java heap and ``spark.driver.maxResultSize`` (0: no limit), in bytes."""
    context: Any = spark.sparkContext
    heap = int(getattr(context._jvm, "java.lang.Runtime").getRuntime().maxMemory())
    return heap, int(java_context(spark).conf().getSizeAsBytes("spark.driver.maxResultSize", "1g"))


def network_timeout(spark: SparkSession) -> float:
    """Return ``spark.network.timeout`` in seconds."""
    return float(java_context(spark).conf().getTimeAsSeconds("spark.network.timeout", "120s"))


def task_slots(spark: SparkSession, profile: ResourceProfile | None) -> int:
    """Return how many tasks of a profile can run at once, busy slots included; None is the default profile."""
    context: Any = java_context(spark)
    java = context.resourceProfileManager().resourceProfileFromId(0) if profile is None else _java(profile)
    return int(context.maxNumConcurrentTasks(java))


def count_executors(spark: SparkSession) -> int:
    """Return the number of executors, without the driver."""
    return int(java_context(spark).getExecutorMemoryStatus().size()) - 1


def executor_ports(spark: SparkSession) -> dict[str, str]:
    """Return ``host:port`` of every live executor, by its ID; for one that is starting, the host alone."""
    executors = items(java_context(spark).statusStore().executorList(True))
    return {each.id(): each.hostPort() for each in executors if each.id() != "driver"}


def decommissioned(spark: SparkSession, executors: Iterable[str]) -> set[str]:
    """Return those of ``executors`` that are being decommissioned."""
    scheduler = java_context(spark).taskScheduler()
    return {each for each in executors if scheduler.getExecutorDecommissionState(each).isDefined()}


def stage_of(spark: SparkSession, tag: str, *, has_input: bool = False) -> Any:
    """Return Spark's record of the result stage of the newest job with a tag; None if it has not started.

    With ``has_input``, earlier jobs with the same tag compute the stage's input. The stage is the one with a barrier.
    """
    context = java_context(spark)
    jobs = list(context.statusTracker().getJobIdsForTag(tag))
    store = context.statusStore()
    if not jobs:
        return None
    last = max(items(store.job(max(jobs)).stageIds()))
    if has_input and not items(store.operationGraphForStage(last).rootCluster().getBarrierClusters()):
        return None
    return store.lastStageAttempt(last)


class Task(NamedTuple):
    """Spark's record of one attempt of a task."""

    partition: int
    number: int
    status: str
    executor: str
    host: str


def tasks_of(spark: SparkSession, tag: str, *, has_input: bool = False) -> list[Task]:
    """Return the attempts of tasks of the stage that :func:`stage_of` finds."""
    stage = stage_of(spark, tag, has_input=has_input)
    if stage is None:
        return []
    found = items(java_context(spark).statusStore().taskList(stage.stageId(), stage.attemptId(), 1 << 20))
    return [Task(task.index(), task.taskId(), task.status(), task.executorId(), task.host()) for task in found]


def items(sequence: Any) -> list[Any]:
    """Return the elements of a Scala Seq."""
    return [sequence.apply(index) for index in range(sequence.size())]


def _java(profile: ResourceProfile) -> Any:
    private: Any = profile
    return private._java_resource_profile


def known_profile(spark: SparkSession, profile: ResourceProfile) -> ResourceProfile:
    """Return an equivalent profile that the application already has; otherwise register `profile` and return it.

    Spark never forgets a profile, and the first use of a new one takes seconds.
    """
    from pyspark.resource import ResourceProfile

    manager = java_context(spark).resourceProfileManager()
    known = manager.getEquivalentProfile(_java(profile))
    if known.isDefined():
        return ResourceProfile(_java_resource_profile=known.get())
    manager.addResourceProfile(_java(profile))
    return profile


def qualified(spark: SparkSession, path: str) -> str:
    """Return `path` with the file system that Spark would use for it: "/models" may be on HDFS."""
    context: Any = spark.sparkContext
    hadoop = getattr(context._jvm, "org.apache.hadoop.fs.Path")(path)
    return str(hadoop.getFileSystem(context._jsc.hadoopConfiguration()).makeQualified(hadoop).toString())


# -- names of stages


@contextmanager
def keeping_call_site(frame: DataFrame) -> Iterator[None]:
    """Keep the thread's call site during actions of `frame`; PySpark would overwrite it before each action.

    In one of our threads, PySpark's call site would be "wrapped at threading.py:982".
    """
    ours: Any = frame
    context, ours._sc = ours._sc, _KeepsCallSite(ours._sc)
    try:
        yield
    finally:
        ours._sc = context


class _KeepsCallSite:
    """Stands in for the SparkContext of one DataFrame."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._jsc = _NoCallSite(context._jsc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _NoCallSite:
    def __init__(self, java: Any) -> None:
        self._java = java

    def setCallSite(self, place: str | None) -> None:  # noqa: N802 - Spark's name
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._java, name)


# -- parameters of Spark ML


def unowned_param(name: str, doc: str) -> Param[Any]:
    """Return a parameter for a class body; each instance makes its own copy."""
    from pyspark.ml.param import Param, Params

    return Param(Params._dummy(), name, doc)


def values_and_defaults(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that are set, and the defaults, each by name."""
    values: Mapping[Param[Any], Any] = params._paramMap
    defaults: Mapping[Param[Any], Any] = params._defaultParamMap
    return {each.name: value for each, value in values.items()}, {each.name: value for each, value in defaults.items()}


def set_defaults(params: Params, defaults: Mapping[str, Any]) -> None:
    """Give parameters their defaults."""
    params._setDefault(**defaults)


def rename(params: Params, uid: str) -> None:
    """Give `params`, and the parameters that it owns, another uid."""
    params._resetUid(uid)


def is_one_of_several_fits() -> bool:
    """Return whether this thread fits an estimator for one of several maps of parameters, or several data sets.

    CrossValidator, TrainValidationSplit, OneVsRest, and ``fit`` with a list of several maps do that. An estimator
    within a Pipeline cannot tell otherwise.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        match frame.f_globals.get("__name__"), frame.f_code.co_name:
            case ("pyspark.ml.tuning", "singleTask") | ("pyspark.ml.classification", "trainSingleClass"):
                return True
            case ("pyspark.ml.base", "fitSingleModel") if len(frame.f_locals.get("paramMaps", ())) > 1:
                return True
        frame = frame.f_back
    return False


# -- what a DataFrame computes, and from what


def has_plan(df: DataFrame) -> bool:
    """Tell whether the plan is in reach; with Spark Connect, it is on the server."""
    return getattr(df, "_jdf", None) is not None


def reads(df: DataFrame) -> list[Any] | None:
    """Identify what `df` computes and what it reads, as a value for JSON; None if that cannot be known for certain.

    This lists the directories of the files that `df` reads, but computes no rows. Parts of the value have a meaning in
    this process only.
    """
    spark: Any = df.sparkSession
    private: Any = df.select("*")  # a new one: each DataFrame looks up cached data once
    execution = private._jdf.queryExecution()
    plan = execution.analyzed()
    patterns = getattr(spark._jvm, "org.apache.spark.sql.catalyst.trees.TreePattern")
    # A subquery hides what it reads, the plan lacks the current time, and nondeterministic values may change.
    hidden = plan.containsPattern(patterns.PLAN_EXPRESSION()) or plan.containsPattern(patterns.CURRENT_LIKE())
    if hidden or not plan.deterministic():
        return None
    # Canonical plans omit the names of columns; the schemas of df and of each relation supply them.
    canonical = plan.canonicalized()
    text = re.sub(r'"jvmId":"[^"]*"', "", canonical.toJSON()) + canonical.toString()
    settings = spark._jsparkSession.conf().getAll().mkString("\0").split("\0")  # time zone, ANSI, case of names ...
    settings = sorted(setting for setting in settings if setting.startswith("spark.sql."))
    parts: list[Any] = [spark.sparkContext.version, settings, df.schema.json(), text, plan.semanticHash()]
    for leaf in [*items(plan.collectLeaves()), *_cached(execution)]:
        part = _leaf(spark, leaf)
        if part is None:
            return None
        parts.append(part)
    return parts


def _leaf(spark: Any, leaf: Any) -> list[Any] | None:
    """Identify what a leaf of a plan reads; None if the leaf is of an unknown kind."""
    identity = getattr(spark._jvm, "java.lang.System").identityHashCode
    kind = leaf.getClass().getSimpleName()
    if kind in ("Range", "OneRowRelation"):
        return ["range", leaf.toString()]
    if kind == "LocalRelation":  # the plan's hash covers its rows, but has only 32 bits
        return [kind, identity(leaf.data())]
    if kind == "LogicalRDD":
        return [kind, leaf.rdd().id()]
    if kind == "InMemoryRelation":
        return [kind, identity(leaf.cacheBuilder())]
    if kind == "LogicalRelation" and leaf.relation().getClass().getSimpleName() == "HadoopFsRelation":
        relation = leaf.relation()
        files = _files(spark, relation.location())
        how = [relation.fileFormat().getClass().getName(), relation.options().toString(), relation.schema().json()]
        return None if files is None else ["files", *how, files]
    return None


def _files(spark: Any, location: Any) -> list[tuple[str, int, int]] | None:
    """Return path, current size and current time of the files that Spark found when the DataFrame was made."""
    paths = set(re.findall(r"[{]path=(.*?); isDirectory=", location.allFiles().mkString("\n")))
    if len(paths) != location.allFiles().size():
        return None
    directories = sorted({posixpath.dirname(path) for path in paths})
    if len(directories) > _MAX_DIRECTORIES:
        return None
    configuration = spark._jsparkSession.sessionState().newHadoopConf()
    files = []
    for directory in directories:
        path = getattr(spark._jvm, "org.apache.hadoop.fs.Path")(directory)
        for status in path.getFileSystem(configuration).listStatus(path):
            name = status.getPath().toString()
            if name in paths:
                files.append((name, status.getLen(), status.getModificationTime()))
    return sorted(files) if len(files) == len(paths) else None


def _cached(execution: Any) -> list[Any]:
    leaves = items(execution.withCachedData().collectLeaves())
    return [leaf for leaf in leaves if leaf.getClass().getSimpleName() == "InMemoryRelation"]


# -- tables of this program


def spark_schema(schema: pa.Schema) -> StructType:
    """Convert Arrow's types to Spark's, keeping timestamps without a zone. Works with Spark Connect, too."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


# -- broadcasts


def read_once(sent: Any) -> Any:
    """Return a broadcast's value inside a task, without caching it in this process; return other objects unchanged."""
    path = getattr(sent, "_path", None)
    if path is not None and hasattr(sent, "load_from_path"):
        return sent.load_from_path(path)
    return sent.value if hasattr(sent, "value") else sent  # an encrypted broadcast is already loaded
