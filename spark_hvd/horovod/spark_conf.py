"""Settings of Spark for elastic runs, under the names of ``horovod.spark.conf``; the keys are those since Spark 3.1.

Each is a pair for ``SparkConf.set(*pair)``.
"""

_MOST, _STAGE = "2147483647", "spark.excludeOnFailure.stage"
_TASK, _APPLICATION = "spark.excludeOnFailure.task", "spark.excludeOnFailure.application"

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", _MOST)
SPARK_CONF_BLACKLIST_DISABLED = ("spark.excludeOnFailure.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = ("spark.excludeOnFailure.enabled", "true")
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_STAGE}.maxFailedTasksPerExecutor", _MOST)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_STAGE}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE = (f"{_STAGE}.maxFailedExecutorsPerNode", "2147483646")
SPARK_CONF_DONT_REUSE_FAILING_NODE = (f"{_STAGE}.maxFailedExecutorsPerNode", "1")
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerExecutor", _MOST)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerExecutor", "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerExecutor", "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerNode", "2147483646")
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerNode", "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerNode", "1")
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_APPLICATION}.maxFailedTasksPerExecutor", _MOST)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_APPLICATION}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (f"{_APPLICATION}.maxFailedExecutorsPerNode", _MOST)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (f"{_APPLICATION}.maxFailedExecutorsPerNode", "1")

SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    "spark.excludeOnFailure.enabled": "false",
    f"{_STAGE}.maxFailedTasksPerExecutor": "2",
    f"{_STAGE}.maxFailedExecutorsPerNode": "2",
    f"{_TASK}.maxTaskAttemptsPerExecutor": "1",
    f"{_TASK}.maxTaskAttemptsPerNode": "2",
    f"{_APPLICATION}.maxFailedTasksPerExecutor": "2",
    f"{_APPLICATION}.maxFailedExecutorsPerNode": "2",
}
"""Spark's defaults for these settings."""
