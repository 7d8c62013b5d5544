"""The rank process: joins the world, runs fn once, reports its outcome, stays until all ranks have ended."""

from __future__ import annotations

import faulthandler
import socket
from typing import TYPE_CHECKING, NoReturn

from spark_hvd.runner.channel.frames import STACKS_SIGNAL, recv_frame, send_frame
from spark_hvd.runner.outcome.endings import is_echo
from spark_hvd.runner.outcome.payload import dump_exception, dump_result
from spark_hvd.runner.rank.process import (
    SetupFailure,
    check_torch,
    end_process,
    exit_code,
    flush_output,
    format_error,
    one_line,
)
from spark_hvd.runner.rank.spec import RankSpec
from spark_hvd.world.env import carried_dialect
from spark_hvd.world.words import bounded

if TYPE_CHECKING:
    from spark_hvd.runner.rank.elastic import ElasticRank
    from spark_hvd.runner.rank.static import StaticRank


def run_rank(control: socket.socket, stacks_fd: int) -> NoReturn:
    """Run one rank and exit. Only the fork server's child calls this.

    It receives the RankSpec, with the pickled call as payload, and ``go``. It sends ``ready``, ``joined``, ``outcome``.
    """
    frame = recv_frame(control)
    if frame is None:  # the supervisor is gone
        end_process(1)
    message, payload = frame
    # Crashes and STACKS_SIGNAL leave the Python stacks where the supervisor reads them.
    faulthandler.enable(stacks_fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, stacks_fd, all_threads=True)
    world = _open(control, RankSpec.from_message(message))
    try:
        value = world.run(payload)
    except SystemExit as left:
        code = exit_code(left.code)
        _send_failure(control, "exit", f"fn called sys.exit({left.code!r}) instead of returning", left)
        _linger(world)
        end_process(code)
    except SetupFailure as error:
        _send_failure(control, "setup", str(error), error.cause)
    except BaseException as error:
        _send_failure(control, "exception", one_line(error), error)
    else:
        try:
            data = dump_result(value, world.rank)
        except Exception as error:
            _send_failure(control, "result", str(error), None)
        else:
            send_frame(control, {"type": "outcome", "ok": True}, data)
    world.leave()
    _linger(world)
    end_process(0)


def _open(control: socket.socket, spec: RankSpec) -> StaticRank | ElasticRank:
    try:
        check_torch()
    except SetupFailure as error:
        _send_failure(control, "setup", str(error), error.cause)
        while recv_frame(control) is not None:
            pass
        end_process(1)
    if carried_dialect():
        import spark_hvd.horovod  # noqa: F401  fn's pickle may name modules of horovod
    if spec.data:
        from spark_hvd.data.registry import register

        register(spec.data)
    if spec.slot is not None:
        from spark_hvd.runner.rank.elastic import ElasticRank

        return ElasticRank(control, spec)
    from spark_hvd.runner.rank.static import StaticRank

    return StaticRank(control, spec)


def _send_failure(control: socket.socket, kind: str, error: str, exception: BaseException | None) -> None:
    text = "" if exception is None else format_error(exception)
    send_frame(
        control,
        {
            "type": "outcome",
            "ok": False,
            "kind": kind,
            "error": bounded(error, 1 << 18),
            "traceback": text,
            "echo": exception is not None and is_echo(exception),
        },
        b"" if exception is None else dump_exception(exception),
    )


def _linger(world: StaticRank | ElasticRank) -> None:
    flush_output()
    world.linger()
