"""A rank's process: the product's launcher, state and loader, in blocking code with a simulated training."""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_hvd.collectives.messages import Request
from spark_hvd.context import leave
from spark_hvd.context.global_state import GlobalState, PendingMember
from spark_hvd.data.loader import ShardLoader
from spark_hvd.data.readers.sharding import Interval, Sharding
from spark_hvd.data.source import ReadOptions
from spark_hvd.elastic.run import _through_generations
from spark_hvd.runner.outcome.endings import is_echo
from spark_hvd.runner.rank.elastic import ElasticRank
from spark_hvd.torch.elastic import TorchState
from spark_hvd.world.layout import RankInfo
from tests.world.clock import Strand, acting, running
from tests.world.mesh import Mesh
from tests.world.store import StoreServer
from tests.world.wire import Pipe

if TYPE_CHECKING:
    from tests.world.world import SimulatedWorld

CONFIG: Any = None
"""Configuration of named collectives; set where the world is built."""


@dataclass(frozen=True)
class Spec:
    """What a rank gets at its start, as far as it matters here; see RankSpec."""

    me: RankInfo
    ip: str
    slot: int
    join_timeout: float
    collective_timeout: float
    stream: int
    ports: None = None
    gpus: None = None
    backend: None = None
    secret: bytes = b""


class Exit(BaseException):
    """The process ends by itself."""

    def __init__(self, code: int) -> None:
        self.code = code


class Early(Exception):
    """Fn returns before its elastic function has ended, if a plan says so."""


class UserError(Exception):
    """The error that the training function raises if a plan says so."""


class RankProcess:
    """See the module's description.

    Args:
        world: Its world.
        host: Its host's name.
        spec: What it got at its start.
    """

    def __init__(self, world: SimulatedWorld, host: str, spec: Spec) -> None:
        self.world, self.host, self.spec = world, host, spec
        self.pid = world.next_pid()
        self.alive, self.orphaned = True, False
        self.exitcode: int | None = None
        self.frames: deque[tuple[dict[str, Any], bytearray]] = deque()
        """What has arrived at the agent."""
        self.on_news: Callable[[], object] = lambda: None
        """Called when something has arrived."""
        self.up = Pipe(world.network, host, host, self._arrived_up)
        self.down = Pipe(world.network, host, host, self._arrived_down)
        self.hung_up = False
        self.global_state = GlobalState()
        self.servers: list[StoreServer] = []
        self.mesh: Mesh | None = None
        self.mail: dict[int, list[tuple[int, Any]]] = {}
        self.told: dict[int, list[tuple[int, Any]]] = {}
        self.joined, self.reset_in = 0, set[int]()
        """The worlds that it has joined, and those of which the state was told."""
        self.functions = 0
        """Elastic functions that it has begun: the first world of each may equal the previous one."""
        self.error: UserError | None = None
        self.hangs, self.returns, self.slow = False, False, 0.0
        self.strand = Strand(world.clock, self._main, self)
        with acting(self):
            self.launcher = ElasticRank(self, spec)  # type: ignore[arg-type]  # the process is its own control socket
        world.processes.append(self)
        world.by_pid[self.pid] = self

    def __repr__(self) -> str:
        return f"rank process {self.spec.stream} on {self.host}"

    # ---- the agent's end ------------------------------------------------------------------------------------------

    def _arrived_up(self, frame: Any) -> None:
        if isinstance(frame, int):
            self.exitcode = frame
        else:
            self.frames.append(frame)
        self.on_news()

    def _arrived_down(self, message: dict[str, Any] | None) -> None:
        if not self.alive:
            return
        if message is None:
            self.hung_up = True
        else:
            with acting(self):
                self.launcher._take(message)
        self.strand.poke()

    def say(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Send a frame to the agent."""
        if self.alive:
            self.up.send((message, bytearray(payload)))

    def stacks(self) -> str:
        """Return its threads' stacks; unused here."""
        return ""

    @property
    def generation(self) -> int:
        """The generation of its world, or of its last one."""
        assert self.mesh is not None
        return self.mesh.generation

    def receive(self, generation: int, sender: int, message: Any) -> None:
        """Take a message from another rank; this one may not have opened its end yet."""
        if self.mesh is not None and self.mesh.generation == generation:
            self.mesh.take(sender, message)
        else:
            self.mail.setdefault(generation, []).append((sender, message))

    def hear(self, generation: int, sender: int, message: Any) -> None:
        """Do the same for named collectives."""
        if self.mesh is not None and self.mesh.generation == generation and self.mesh.named is not None:
            self.mesh.named.take_message(sender, message)
        else:
            self.told.setdefault(generation, []).append((sender, message))

    # ---- its end --------------------------------------------------------------------------------------------------

    def die(self, code: int) -> None:
        """End the process: the kernel closes its connections."""
        if not self.alive:
            return
        self.world.log("{} ends with {}", self, code)
        self.alive = False
        if self.mesh is not None:
            self.mesh.close()
            if self.mesh.named is not None:
                self.mesh.named.hang_up()
        for server in self.servers:
            server.close()
        self.up.send(code)
        if self.strand is not running():
            self.strand.kill()

    def freeze(self, *, frozen: bool) -> None:
        """Stop it, or let it continue."""
        self.strand.frozen = frozen
        self.strand.poke()
        if self.mesh is not None and self.mesh.named is not None:
            self.mesh.named.turn()

    # ---- the program ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        except Exit as left:
            self.die(left.code)

    def _run(self) -> None:
        clock, strand = self.world.clock, self.strand
        self.global_state.pending = PendingMember(self.spec.me, CONFIG, 0)
        strand.wait(lambda: False, clock.some(*self.world.plan.preparing))
        if self.world.hosts[self.host].bad:
            raise Exit(1)
        try:
            value = self._train() if self.world.plan.elastic and not self.returns else None
        except Early:
            self.say({"type": "outcome", "ok": True}, pickle.dumps(None))
        except AssertionError:
            raise
        except Exception as error:
            message = {
                "type": "outcome",
                "ok": False,
                "kind": "exception",
                "error": f"{type(error).__name__}: {error}",
                "traceback": "",
                "echo": is_echo(error),
            }
            self.say(message)
        else:
            self.say({"type": "outcome", "ok": True}, pickle.dumps(value))
        leave.end("the rank leaves")
        strand.wait(lambda: self.hung_up)
        self.die(0)

    def _train(self) -> Any:
        plan = self.world.plan
        loader = ShardLoader("rows", Rows(plan.rows), Sharding(plan.rows, plan.batch_size), OPTIONS, lambda: OPTIONS)  # type: ignore[arg-type,return-value]
        state: Any = TorchState(loader=loader, made=(0, 0, ""))  # weights, steps, rows

        def function(until: int) -> Any:
            self.functions += 1
            return _through_generations(self.launcher, state, lambda: loop(until))

        def loop(until: int) -> Any:
            while loader.epoch < until:
                epoch = loader.epoch
                for rows in loader:
                    self._step(state, epoch, rows)
                    if state.made[1] % plan.commit_every == 0:
                        state.commit()
                    elif plan.checks:
                        state.check_host_updates()
            return state.made

        state.register_reset_callbacks([lambda: self.reset_in.add(self.generation)])
        return [function(until) for until in range(plan.epochs - plan.again, plan.epochs + 1)][-1]

    def _step(self, state: Any, epoch: int, rows: list[int]) -> None:
        self.strand.wait(lambda: False, self.world.clock.some(0.5, 1.0) * self.world.plan.step_seconds + self.slow)
        self.strand.wait(lambda: not self.hangs)
        if self.error is not None:
            raise self.error
        if self.returns:
            raise Early
        if self.world.poison.intersection(rows):
            raise Exit(-9)
        mesh = self.mesh
        assert mesh is not None
        assert len(self.reset_in) >= self.joined - self.functions, "the state was not told of another world"
        assert mesh.named is not None
        weights, step, seen = state.made
        parts = {"gradients": (weights, step, epoch), "rows": rows}
        sealed = self.world.plan.sealed
        calls = [
            ("gradients", Request("allreduce", ["float32"], [[8]], "cpu", "SUM")),
            ("rows", Request("allgather", ["int64"], [[len(rows)]], "cpu", seal=_seal(rows) if sealed else None)),
        ]
        self.world.clock.random.shuffle(calls)  # like hooks: gradients become ready in any order
        entries = mesh.named.run(calls)
        given = {entry.name: mesh.exchange(entry.name, parts[entry.name]) for entry in entries}
        seals = next(entry.seals for entry in entries if entry.name == "rows")
        assert seals == ([_seal(theirs) for theirs in given["rows"]] if sealed else None)
        told = [(*first, theirs) for first, theirs in zip(given["gradients"], given["rows"], strict=True)]
        together = sorted(row for *_, theirs in told for row in theirs)
        self.world.checks.stepped(self, mesh.generation, told)
        weights = zlib.crc32(repr((weights, epoch, together)).encode())
        state.made = weights, step + 1, seen + "".join(f" {epoch}:{row}" for row in together)


def _seal(rows: list[int]) -> str:
    return f"sealed {sum(rows)}"


OPTIONS = ReadOptions(columns=("row",))


class Rows:
    """A source of rows that are their own numbers."""

    def __init__(self, rows: int) -> None:
        self.rows, self.layout = rows, 0

    def open(self, options: Any, form: Any) -> Rows:
        return self

    def batches(self, epoch: int, share: Sequence[Interval], sizes: Sequence[int]) -> Generator[list[int], None, None]:
        rows = iter([row for start, stop in share for row in range(start, stop)])
        for size in sizes:
            yield [next(rows) for _ in range(size)]

    def close(self) -> None:
        pass
