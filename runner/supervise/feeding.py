"""The Spark task of a feeder: finds the address at which ranks can reach it, and feeds them until they end."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_hvd.data.feeders.feeder import serve
from spark_hvd.data.feeders.mapping import RowMap
from spark_hvd.data.feeders.sockets import FeedAddress
from spark_hvd.runner.channel.address import choose_address, is_loopback, own_addresses
from spark_hvd.runner.config import CommonConfig
from spark_hvd.runner.outcome.payload import dump_exception

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class FeederSpec:
    """The driver's specification for every feeder of a run."""

    config: CommonConfig = field(repr=False)
    feed: FeedAddress
    maps: Mapping[str, RowMap]


def run_feeder(spec: FeederSpec, payload: bytes) -> Iterator[pyarrow.RecordBatch]:
    """Feed ranks until they end. Yields nothing, but Spark expects an iterator."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    driver = spec.feed.endpoint.host
    alone = is_loopback(driver)
    host = "localhost" if alone else socket.gethostname()
    address = choose_address(host, spec.config.interfaces, driver, alone=alone, own=own_addresses())
    name = f"{context.partitionId()}.{context.taskAttemptId()}"
    serve(spec.feed, name, address.ip, spec.config.port_range, spec.maps, dump_exception)
    yield from ()
