"""Any sequence of joins, losses, hangs, notices and late messages ends in a running world, or a named error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_hvd.runner.elastic.membership.events import End, Limits
from tests.elastic_model import Model


def up(model: Model, pick: int) -> None:
    tasks = {task for _, task in model.agents.values()}
    free = [task for task in range(model.limits.max_num_proc) if task not in tasks]
    if free:
        model.up(
            len(model.membership.roster.workers) + 100 + int(model.now * 10), f"host{pick % 3}", free[pick % len(free)]
        )


def an_agent(model: Model, pick: int) -> int | None:
    return sorted(model.agents)[pick % len(model.agents)] if model.agents else None


def lose(model: Model, pick: int) -> None:
    if (agent := an_agent(model, pick)) is not None:
        model.lose(agent)


def vanish(model: Model, pick: int) -> None:
    """An executor goes; Spark says so only by starting its task anew."""
    if (agent := an_agent(model, pick)) is not None:
        task = model.agents[agent][1]
        model.kill_agent(agent)
        model.run(pick % 3 / 2)
        if task not in {other for _, other in model.agents.values()}:
            model.up(agent + 10_000, f"host{pick % 3}", task)


def leave(model: Model, pick: int) -> None:
    if (agent := an_agent(model, pick)) is not None:
        model.leave(agent)


def die(model: Model, pick: int) -> None:
    if alive := model.alive():
        model.fail_process(alive[pick % len(alive)], raised=pick % 5 == 0)


def hang(model: Model, pick: int) -> None:
    if alive := model.alive():
        alive[pick % len(alive)].hangs = True


def breaks(model: Model, pick: int) -> None:
    """A network that recovers: collectives fail, nobody is gone."""
    training = [process for process in model.alive() if process.state == "training"]
    if training:
        model.break_up(training[pick % len(training)], "connection reset by peer")


def time(model: Model, pick: int) -> None:
    model.run(pick % 30 / 10)


def still(model: Model, pick: int) -> None:
    model.run(pick % 30 / 10, commit=False)


ACTIONS: list[Callable[[Model, int], None]] = [up, lose, vanish, leave, die, hang, breaks, time, still]


@pytest.mark.slow
@example([(time, 11), (vanish, 1), (hang, 0), (hang, 1)], 1, False)
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), max_size=25),
    st.integers(1, 3),
    st.booleans(),
)
def test_it_ends_in_a_running_world_or_a_named_error(
    program: list[tuple[Callable[[Model, int], None], int]], least: int, cools: bool
) -> None:
    limits = Limits(
        num_proc=3,
        min_num_proc=least,
        max_num_proc=4,
        start_timeout=20.0,
        elastic_timeout=60.0,
        cooldown=(5.0, 20.0) if cools else None,
    )
    model = Model(limits, steps=10**9)
    for agent in range(3):
        model.up(agent)
    for action, pick in program:
        if model.membership.verdict is None:
            action(model, pick)
    for process in model.alive():
        process.hangs = False if process.state == "preparing" else process.hangs
    world = [process for process in model.alive() if process.state == "training"]
    if all(process.hangs for process in world):  # nobody is left whose collective could time out, whoever else waits
        for process in world:
            process.hangs = False
    # A rank that hangs while all train stops them until their collectives time out.
    for _ in range(4):
        model.run(35.0, tick=0.5)
        stuck = [process for process in model.alive() if process.state == "training"]
        if any(process.hangs for process in stuck):
            for process in stuck:
                if not process.hangs and process.state == "training":
                    model.break_up(process, "no answer for collective_timeout")
    model.run(70.0, tick=0.5)
    verdict = model.membership.verdict
    if verdict is None:
        before = max(process.commits for process in model.processes.values())
        model.run(5.0)
        assert model.size >= least
        assert max(process.commits for process in model.processes.values()) > before, "it trains"
        assert all(model.of_rank(rank).state == "training" for rank in range(model.size))
    else:
        assert verdict.end is not End.DONE
        assert verdict.text
        model.run(1.0)
        assert not model.alive(), "no process stays"
