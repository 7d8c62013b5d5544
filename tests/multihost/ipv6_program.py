"""A program whose Spark uses IPv6 only, between two hosts without IPv4; prints the ranks' results as JSON.

A separate program, because the driver's JVM needs this setting at its start: `python -m tests.multihost.ipv6_program`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle

from spark_hvd.runner import run
from tests.conftest import SHORT_LIVED  # sets SPARK_LOCAL_IP, which has another value here
from tests.multihost.hosts import make_hosts
from tests.multihost.standalone import bracketed, make_cluster


def fn() -> tuple[str, float, float]:
    import os

    import torch

    import spark_hvd.torch as hvd

    by_name = hvd.synchronize(hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name="x"))
    return os.environ["MASTER_ADDR"], float(hvd.allreduce(torch.ones(1), op=hvd.Sum)), float(by_name.mean())


def main() -> None:
    """Create hosts and a cluster, and run."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory(prefix="ipv6-") as folder, make_hosts(2, six=True) as net:
        os.environ["SPARK_LOCAL_IP"] = bracketed(net.driver)
        os.environ["SPARK_PREFER_IPV6"] = "true"  # otherwise PySpark looks for its JVM at 127.0.0.1
        six = f"-Djava.net.preferIPv6Addresses=true {SHORT_LIVED}"
        os.environ["PYSPARK_SUBMIT_ARGS"] = f'--driver-java-options "{six}" pyspark-shell'
        settings: dict[str, Any] = {"spark.executor.extraJavaOptions": six}
        with make_cluster(net, Path(folder), **settings) as cluster:
            values = run(fn, num_proc=2, spark=cluster.session, start_timeout=200)
    print(json.dumps({"hosts": [host.address for host in net.hosts], "values": values}))


if __name__ == "__main__":
    main()
