"""Litmus tests of what ranks write to and read from their shared memory, in a model weaker than x86 and Armv8.

In the model a processor may do its reads and writes in any order, whatever the dependencies, except that a fence
separates those before it from those after it, and that those of one location stay in order. A write reaches all others
at once, as on both (Arm calls it other-multi-copy atomicity). So what cannot happen here cannot happen there.

Each case is a place in spark_hvd.transport.host.pipes or spark_hvd.collectives.pending.slots. The tests also show
that its fences are needed: without any one of them, the forbidden outcome can happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import NamedTuple

import pytest


class Op(NamedTuple):
    """A write of `value` to `place`, a read of it into the register `into`, or a fence."""

    place: str = ""
    value: int = 0
    into: str = ""


FENCE = Op()
Program = tuple[Op, ...]
Registers = dict[str, int]


def write(place: str, value: int) -> Op:
    return Op(place, value)


def read(place: str, into: str) -> Op:
    return Op(place, into=into)


def orders(program: Program) -> Iterator[Program]:
    """Return all orders in which a processor may execute it."""
    if FENCE in program:
        at = program.index(FENCE)
        for first in orders(program[:at]):
            for rest in orders(program[at + 1 :]):
                yield first + rest
        return
    for order in permutations(range(len(program))):
        kept = all(a < b for i, a in enumerate(order) for b in order[i + 1 :] if program[a].place == program[b].place)
        if kept:
            yield tuple(program[number] for number in order)


def mixed(programs: tuple[Program, ...]) -> Iterator[Program]:
    """Return all interleavings of several processors' operations."""
    if not any(programs):
        yield ()
    for number, program in enumerate(programs):
        if program:
            for rest in mixed((*programs[:number], program[1:], *programs[number + 1 :])):
                yield program[:1] + rest


def outcomes(programs: tuple[Program, ...]) -> Iterator[Registers]:
    """Return the possible final values of the registers; all memory is 0 at the start."""
    for chosen in product(*map(orders, programs)):
        for run in mixed(chosen):
            memory: dict[str, int] = {}
            registers: Registers = {}
            for op in run:
                if op.into:
                    registers[op.into] = memory.get(op.place, 0)
                else:
                    memory[op.place] = op.value
            yield registers


CASES: dict[str, tuple[tuple[Program, ...], Callable[[Registers], bool]]] = {
    # Pipes.send and Pipes.arrived; Slots.enter and Slots.state: a rank that sees the counter or the word sees the data.
    "data before the flag": (
        (
            (write("data", 1), FENCE, write("flag", 1)),
            (read("flag", "flag"), FENCE, read("data", "data")),
        ),
        lambda seen: seen["flag"] == 1 and seen["data"] == 0,
    ),
    # Slots' copies take turns: a rank that sees this one in the next round overwrites what this one has read by then.
    "read before it is overwritten": (
        (
            (read("data", "data"), FENCE, write("flag", 1)),
            (read("flag", "flag"), FENCE, write("data", 1)),
        ),
        lambda seen: seen["flag"] == 1 and seen["data"] == 1,
    ),
    # Pipes.send and Pipes.wait; Slots.sleep: no wake-up is lost.
    "asleep or awake": (
        (
            (write("counter", 1), FENCE, read("asleep", "asleep")),
            (write("asleep", 1), FENCE, read("counter", "counter")),
        ),
        lambda seen: seen["asleep"] == 0 and seen["counter"] == 0,
    ),
    # Slots.close and Slots.state: a rank that tries to withdraw sees who is missing, or complete ranks see it.
    "withdraws or takes part": (
        (
            (write("tries", 1), FENCE, read("come", "come")),
            (write("come", 1), FENCE, read("tries", "tries")),
        ),
        lambda seen: seen["come"] == 0 and seen["tries"] == 0,
    ),
    # The same with a third rank missing: a rank that sees it arrive looks at all words once more.
    "withdraws while a third comes": (
        (
            (write("tries", 1), FENCE, read("come", "missed")),
            (read("come", "come"), FENCE, read("tries", "tries")),
            (write("come", 1),),
        ),
        lambda seen: seen["missed"] == 0 and seen["come"] == 1 and seen["tries"] == 0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_must_not_happen_cannot(name: str) -> None:
    programs, forbidden = CASES[name]
    assert not any(map(forbidden, outcomes(programs)))


@pytest.mark.parametrize("name", CASES)
def test_each_fence_is_needed(name: str) -> None:
    programs, forbidden = CASES[name]
    for number, program in enumerate(programs):
        if FENCE in program:
            unfenced = tuple(op for op in program if op != FENCE)
            assert any(map(forbidden, outcomes((*programs[:number], unfenced, *programs[number + 1 :]))))
