"""Messages of agents become events, decisions become messages; silence becomes a loss."""

from __future__ import annotations

import json
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner import RankFailedError, RunTimeoutError
from spark_hvd.runner.channel.liveness import SILENT_AFTER
from spark_hvd.runner.channel.state import Send
from spark_hvd.runner.cli import exit_code_of
from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.elastic.hub import ElasticHub, ElasticState
from spark_hvd.runner.elastic.membership.events import End, Limits, Verdict
from spark_hvd.runner.elastic.results import elastic_results
from spark_hvd.runner.elastic.run import attend_elastic
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.outcome.rows import Failed, FailureKind

LIMITS = Limits(num_proc=2, min_num_proc=1, max_num_proc=2)


class Hub:
    """An ElasticState with a clock, whose messages go through JSON as on the wire."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.state = ElasticState(limits)
        self.now = 100.0
        self.sent: list[tuple[int, dict[str, Any]]] = []

    def say(self, agent: int, kind: str, **fields: Any) -> list[tuple[int, dict[str, Any]]]:
        message = json.loads(json.dumps({"type": kind, "rank": agent, **fields}))
        return self._keep(self.state.handle(message, self.now))

    def wait(self, seconds: float, *beating: int) -> list[tuple[int, dict[str, Any]]]:
        sent = []
        for _ in range(int(seconds * 10)):
            self.now += 0.1
            for agent in beating:
                sent += self.say(agent, "alive")
            sent += self._keep(self.state.tick(self.now))
        return sent

    def results(self) -> list[Any]:
        verdict, outcomes, culprit = self.state.membership.verdict, self.state.outcomes, self.state.culprit
        server: Any = SimpleNamespace(verdict=verdict, outcomes=outcomes, culprit=culprit)
        return elastic_results(server, [])

    def _keep(self, sends: list[Send]) -> list[tuple[int, dict[str, Any]]]:
        return [(send.rank, json.loads(json.dumps(send.message))) for send in sends]


def two() -> Hub:
    """Two agents whose workers train in generation 0."""
    hub = Hub()
    hub.say(10, "hello", host="a", task=0, attempt=10)
    started = hub.say(11, "hello", host="b", task=1, attempt=11)
    assert [(agent, message["type"], message["worker"]) for agent, message in started] == [
        (10, "start", 0),
        (11, "start", 1),
    ]
    hub.say(10, "entered", worker=0)
    assigned = hub.say(11, "entered", worker=1)
    assert [(agent, message["place"]["rank"]) for agent, message in assigned] == [(10, 0), (11, 1)]
    hub.say(10, "ready", worker=0, generation=0, store=["10.0.0.1", 4000])
    going = hub.say(11, "ready", worker=1, generation=0, store=None)
    assert [message["store"] for _, message in going] == [["10.0.0.1", 4000]] * 2
    for agent, worker in ((10, 0), (11, 1)):
        hub.say(agent, "joined", worker=worker, generation=0)
    return hub


def test_ranks_meet() -> None:
    two()


def test_output_is_labelled_with_the_present_rank() -> None:
    hub = two()
    assert hub.state.labels == {10: 0, 11: 1}
    hub.say(10, "ended", worker=0, loss="failed", error="was killed by SIGKILL", raised=False)
    hub.say(11, "entered", worker=1)
    assert hub.state.labels[11] == 0


def test_an_agent_that_is_silent_is_lost_and_sent_away_when_it_comes_back() -> None:
    hub = two()
    told = hub.wait(SILENT_AFTER + 1, 11)
    assert (11, "reset") in [(agent, message["type"]) for agent, message in told]
    assert "rank 0 on host a: has not been heard from" in " ".join(hub.state.notes)
    assert [(agent, message["type"], message["again"]) for agent, message in hub.say(10, "alive")] == [
        (10, "end", True)
    ]


def test_one_that_is_heard_of_is_not_lost() -> None:
    hub = two()
    assert hub.wait(SILENT_AFTER * 3, 10, 11) == []


def test_silence_counts_sooner_while_all_wait() -> None:
    hub = two()
    hub.say(11, "broken", worker=1, generation=0, error="connection reset by peer")
    hub.say(11, "entered", worker=1)
    told = hub.wait(SILENT_AFTER - 2, 11)
    assert (11, "assign") in [(agent, message["type"]) for agent, message in told]


def test_time_that_the_driver_slept_is_nobodys_delay() -> None:
    hub = two()
    hub.say(11, "broken", worker=1, generation=0, error="connection reset by peer")
    hub.now += LIMITS.rejoin_timeout + 5.0  # both have returned meanwhile
    told = hub.say(11, "entered", worker=1) + hub.say(10, "entered", worker=0)
    assert [message["type"] for _, message in told] == ["assign", "assign"]
    hub.wait(1.0, 10, 11)
    hub.now += LIMITS.rejoin_timeout + 5.0
    told = hub.say(10, "ready", worker=0, generation=1, store=["10.0.0.1", 4001])
    told += hub.say(11, "ready", worker=1, generation=1, store=None)
    assert [message["type"] for _, message in told] == ["go", "go"]
    told = hub.wait(LIMITS.rejoin_timeout + 1.0, 10, 11)
    assert [message["type"] for _, message in told if message["type"] == "stop"] == ["stop", "stop"]


def test_a_task_that_comes_when_all_is_over_is_let_go() -> None:
    hub = two()
    for agent, worker in ((10, 0), (11, 1)):
        hub.say(agent, "finished", worker=worker, generation=0)
    for agent, worker in ((10, 0), (11, 1)):
        hub.say(agent, "ended", worker=worker, loss=None, error="", raised=False)
    assert hub.state.membership.verdict is not None
    assert hub.state.membership.verdict.end is End.DONE
    assert hub.say(12, "hello", host="c", task=2, attempt=12) == [
        (12, {"type": "end", "agent": 12, "again": False, "report": ""})
    ]


def test_all_are_gone_when_each_has_said_so() -> None:
    hub = two()
    assert not hub.state.all_gone
    hub.state.stop("the run was stopped")
    hub.say(10, "gone", why="the run is over")
    assert not hub.state.all_gone
    hub.say(11, "gone", why="the run is over")
    assert hub.state.all_gone


def test_a_notice_makes_a_rank_leave_at_the_next_commit() -> None:
    hub = two()
    told = hub.say(10, "leaving", worker=0, why="SIGTERM to the rank")
    assert {(agent, message["type"]) for agent, message in told} == {(10, "update"), (11, "update")}


def returned(hub: Hub, *agents: int) -> list[tuple[int, dict[str, Any]]]:
    """Let these agents' workers, which train in the current generation, return from fn."""
    generation = hub.state.membership.generation
    assert generation is not None
    workers = {agent: hub.state.membership.roster.agents[agent].worker for agent in agents}
    for agent, worker in workers.items():
        hub.say(agent, "finished", worker=worker, generation=generation.number)
    sent = []
    for agent, worker in workers.items():
        sent += hub.say(agent, "ended", worker=worker, loss=None, error="", raised=False)
    return sent


def test_values_come_by_spark_where_its_job_ends() -> None:
    hub = two()
    sent = returned(hub, 10, 11)
    assert [(agent, message["type"], message["report"]) for agent, message in sent] == [
        (10, "end", ""),
        (11, "end", ""),
    ]
    assert not hub.state.handed_over


def test_values_come_by_the_hub_where_a_task_is_on_a_host_that_is_cut_off() -> None:
    hub = two()
    hub.wait(SILENT_AFTER + 1, 11)
    hub.say(11, "entered", worker=1)
    hub.say(11, "ready", worker=1, generation=1, store=["10.0.0.1", 4001])
    hub.say(11, "joined", worker=1, generation=1)
    sent = returned(hub, 11)
    assert [(agent, message["type"], message["report"]) for agent, message in sent] == [(11, "end", "values")]
    for part, data in enumerate((b"a", b"b")):
        assert not hub.state.handed_over
        message = {"worker": 1, "place": 0, "ok": True, "part": part, "parts": 2, "payload": data}
        hub.state.handle({"type": "value", "rank": 11, **message}, hub.now)
    assert hub.state.handed_over
    assert hub.state.outcomes[1].data == b"ab"


def test_values_come_by_the_hub_where_a_task_has_left_by_notice_and_not_come_again() -> None:
    hub = two()
    hub.say(10, "leaving", worker=0, why="SIGTERM to its executor")
    for agent, worker in ((10, 0), (11, 1)):
        hub.say(agent, "yielded", worker=worker, generation=0)
        hub.say(agent, "entered", worker=worker)
    hub.say(10, "ended", worker=0, loss="lost", error="left", raised=False)
    hub.say(10, "gone", why="the executor of this task will leave")
    hub.say(11, "ready", worker=1, generation=1, store=["10.0.0.1", 4001])
    hub.say(11, "joined", worker=1, generation=1)
    assert [(agent, message.get("report")) for agent, message in returned(hub, 11)] == [(11, "values")]


def test_failures_come_by_the_hub_where_a_task_is_on_a_host_that_is_cut_off() -> None:
    hub = two()
    hub.wait(SILENT_AFTER + 1, 11)
    hub.say(11, "entered", worker=1)
    hub.say(11, "ready", worker=1, generation=1, store=["10.0.0.1", 4001])
    hub.say(11, "joined", worker=1, generation=1)
    sent = hub.say(11, "ended", worker=1, loss="failed", error="ValueError: bad", raised=True)
    assert [(agent, message["type"], message["report"]) for agent, message in sent] == [(11, "end", "failures")]
    failed = Failed(0, "b", FailureKind.EXCEPTION, "ValueError: bad", "Traceback: in fn")
    message = {"worker": 1, "place": 0, "ok": False, "part": 0, "parts": 1, "payload": pickle.dumps(failed)}
    hub.state.handle({"type": "value", "rank": 11, **message}, hub.now)
    with pytest.raises(RankFailedError, match="Traceback: in fn") as caught:
        hub.results()
    assert caught.value.failures == (failed,)


def test_an_error_names_a_rank_that_has_no_failure_of_its_own() -> None:
    hub = Hub()
    hub.say(10, "hello", host="a", task=0, attempt=10)
    hub.say(11, "hello", host="b", task=1, attempt=11)
    hub.say(10, "entered", worker=0)
    hub.say(11, "ended", worker=1, loss=None, error="", raised=False)
    with pytest.raises(RankFailedError, match=r"a new rank \(number 1\) on host b returned from fn without") as caught:
        hub.results()
    assert (caught.value.rank, caught.value.host, caught.value.first.kind) == (1, "b", FailureKind.RESULT)
    assert exit_code_of(caught.value) == 1
    hub = two()
    for agent, worker in ((10, 0), (11, 1)):
        hub.say(agent, "finished", worker=worker, generation=0)
    hub.say(10, "ended", worker=0, loss=None, error="", raised=False)
    hub.say(10, "gone", why="it was interrupted")
    with pytest.raises(RankFailedError, match="its value is lost") as caught:
        hub.results()
    assert (caught.value.rank, caught.value.host) == (0, "a")


def test_the_timeout_also_holds_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        """Like Spark's job while it waits for a host that does not answer."""

        running = True

        def wait(self, timeout: float) -> None:
            time.sleep(min(timeout, 0.02))

        def cancel(self) -> None:
            self.running = False

    job: Any = Job()
    config = RunConfig(num_proc=1, timeout=0.2, verbose=0)
    with make_monitor(config, print, 1) as monitor:
        hub = ElasticHub(LIMITS, "127.0.0.1", None, monitor.hear)
        monkeypatch.setattr(hub._state.membership, "verdict", Verdict(End.DONE, ranks=(0,)))
        try:
            with pytest.raises(RunTimeoutError, match=r"Spark had not handed over their values after timeout=0.2 s"):
                attend_elastic(job, hub, config, monitor)
        finally:
            hub.close()
    assert not job.running


@pytest.mark.parametrize("kind", ["examine", "profile"])
def test_a_worker_that_starts_is_asked_nothing(kind: str) -> None:
    hub = Hub()
    hub.say(10, "hello", host="a", task=0, attempt=10)
    hub.say(11, "hello", host="b", task=1, attempt=11)
    assert hub.state.labels.keys() == {10, 11}  # both were told to start one
    assert hub.state.tell({"type": kind}) == []
    hub = two()
    assert [send.rank for send in hub.state.tell({"type": kind})] == [10, 11]
    started = hub.say(10, "ended", worker=0, loss="failed", error="was killed by SIGKILL", raised=False)
    assert (10, "start") in [(agent, message["type"]) for agent, message in started]
    assert [send.rank for send in hub.state.tell({"type": kind})] == [11]
