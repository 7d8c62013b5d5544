"""The small changes to code that show what tests notice."""

from __future__ import annotations

from tests.mutants import chosen, drawn, mutants_of

SOURCE = '''\
LIMIT = 3

class Stage(Enum):
    OPEN = "open"

def look(at: int, *, é: bool = True) -> int:
    """Not 1 text."""
    assert at > 0
    if at < LIMIT and not é:
        self.stage = Stage.OPEN
        return 1
    elif at in (Stage.CLOSED,):
        close(f"{at + 1}")
    return at + 2
'''.encode()


def test_all_small_changes_of_functions_are_found() -> None:
    changed = [
        (m.line, m.kind, m.of(SOURCE).decode().splitlines()[m.line - 1].strip()) for m in mutants_of("a", SOURCE)
    ]
    assert changed == [
        (9, "condition negated", "if (not (at < LIMIT and (not é))):"),
        (9, "and/or swapped", "if (at < LIMIT or not é):"),
        (9, "comparison flipped", "if (at <= LIMIT) and not é:"),
        (9, "not dropped", "if at < LIMIT and (é):"),
        (10, "statement dropped", "pass"),
        (10, "constant swapped", "self.stage = (Stage.CLOSED)"),
        (11, "one more", "return (2)"),
        (11, "one less", "return (0)"),
        (12, "condition negated", "elif (not at in (Stage.CLOSED,)):"),
        (12, "comparison flipped", "elif (at not in (Stage.CLOSED,)):"),
        (12, "constant swapped", "elif at in ((Stage.OPEN),):"),
        (13, "statement dropped", "pass"),
        (14, "+/- swapped", "return (at - 2)"),
        (14, "one more", "return at + (3)"),
        (14, "one less", "return at + (1)"),
    ]


def test_a_seed_stands_for_the_same_mutants_no_two_on_a_line() -> None:
    found = mutants_of("a", SOURCE)
    assert chosen(found, 4, 1) == chosen(found, 4, 1) != chosen(found, 4, 2)
    assert len({mutant.line for mutant in chosen(found, 99, 1)}) == len(chosen(found, 99, 1)) == 6


def test_files_are_drawn_by_their_lines() -> None:
    for seed in range(100):
        assert drawn({"b": 50, "a": 50, "c": 100}, 4, seed) == ["a", "b", "c"]
    both = [drawn({"a": 90, "b": 10}, 1, seed) for seed in range(100)]
    assert both.count(["a"]) > both.count(["b"]) > 0
