"""``run_local``: the contract of ``run`` with plain processes on this machine; no Spark, no Java."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, TextIO, TypeVar

from spark_hvd.layout import WorldLayout
from spark_hvd.runner.collect import results
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.hub import Hub, Link
from spark_hvd.runner.hub_state import HubState
from spark_hvd.runner.launch import make_printer
from spark_hvd.runner.outcome import Packed
from spark_hvd.runner.payload import dump_call
from spark_hvd.runner.processes import fork_server
from spark_hvd.runner.supervise import supervise
from spark_hvd.runner.task import TaskSpec, meet

R = TypeVar("R")
_HOST = "127.0.0.1"


def run_local(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 2,
    *,
    backend: str | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    collective_timeout: float = 1800.0,
    verbose: int = 1,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> list[R]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` ranks of this machine; for debugging, tests and single machines.

    The same as :func:`spark_hvd.run` in everything that fn and the caller can see, over the loopback interface.

    Args:
        fn: The training function.
        args: Positional arguments of fn.
        kwargs: Keyword arguments of fn.
        num_proc: Number of ranks.
        backend: "gloo", "nccl", or None for NCCL on CUDA tensors and Gloo on CPU tensors.
        env: Changes to the environment of the ranks; None as a value unsets a variable. OMP_NUM_THREADS is each rank's
            share of the cores, unless it is set here or in this process.
        start_timeout: Seconds for all ranks to be up.
        timeout: Seconds that fn may run, or None for no limit.
        collective_timeout: Seconds after which a collective fails that not all ranks have joined.
        verbose: 0 shows nothing, 1 what ranks print, each line with ``[rank]`` before it.
        stdout: Text stream for the ranks' stdout instead of ``sys.stdout``.
        stderr: Text stream for the ranks' stderr instead of ``sys.stderr``.

    Returns:
        What fn returned on every rank, in rank order.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was started.
        UnpicklableError: fn or an argument cannot be pickled.
        RankFailedError: a rank raised, exited or was killed.
        RunTimeoutError: ``timeout`` was over.
        KeyboardInterrupt: after every rank has been stopped.
    """
    config = RunConfig(
        num_proc=num_proc,
        backend=backend,
        env=dict(env or {}),
        start_timeout=start_timeout,
        timeout=timeout,
        collective_timeout=collective_timeout,
        verbose=verbose,
    )
    if "OMP_NUM_THREADS" not in os.environ:
        config = replace(config, env={"OMP_NUM_THREADS": str(_cores_each(num_proc)), **config.env})
    payload = dump_call(fn, args, kwargs or {})
    printer = make_printer(config, stdout, stderr)
    packed: list[Packed | Exception] = []
    with ExitStack() as cleanup:
        hub = Hub(HubState(num_proc, timeout=config.timeout), _HOST, on_output=printer.put)
        cleanup.callback(hub.close)
        spec = TaskSpec.of(config, f"spark_hvd-{uuid.uuid4().hex[:12]}", hub.address)

        def rank_thread(rank: int) -> None:
            try:
                packed.append(_run_rank(spec, payload, layout, rank))
            except Exception as error:
                packed.append(error)
                hub.stop("peer")

        layout = WorldLayout.from_hosts([_HOST] * num_proc)
        threads = [
            threading.Thread(target=rank_thread, args=(rank,), name=f"spark_hvd-rank-{rank}", daemon=True)
            for rank in range(num_proc)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.01)
                printer.flush()
        except BaseException:
            hub.stop("interrupt")
            for thread in threads:
                thread.join()
            raise
        finally:
            printer.flush()
        order = hub.snapshot()[1]
    printer.flush()
    for item in packed:
        if isinstance(item, Exception):
            raise item
    done = sorted((item for item in packed if isinstance(item, Packed)), key=lambda item: item.rank)
    return results(done, num_proc, order, config.timeout)


def _cores_each(num_proc: int) -> int:
    """Cores for one rank: left alone, torch starts a thread a core in every rank, and they wait for each other."""
    return max(1, (os.cpu_count() or 1) // num_proc)


def _run_rank(spec: TaskSpec, payload: bytes, layout: WorldLayout, rank: int) -> Packed:
    me = layout.ranks[rank]
    assert spec.hub is not None
    server = fork_server(spec.env, os.getpid())
    link = meet(Link(spec.hub, rank), rank, spec.start_timeout)
    assert link is not None
    with closing(link):
        return supervise(spec.job(me, _HOST, payload, None), link, server)
