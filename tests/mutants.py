"""Tests the tests: ``python -m tests.mutants [options] MODULE... -- TEST...`` changes code a little and runs tests.

Each mutant is one change in a function: a flipped comparison, a negated condition, a number that is off by one, a
dropped statement, or another constant. The tests run on a copy of the tree and stop at the first failure, which kills
the mutant. A surviving mutant shows behaviour that none of these tests checks, or a line without effect. The seed
determines the changes, so that other tests can run on the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.jvm import ARCHIVE

_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_DROPPED = (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
_PATIENCE = 30.0
"""Seconds that tests get besides three times what they take on the unchanged code."""


@dataclass(frozen=True)
class Mutant:
    """A change: bytes ``start`` to ``stop`` of the file at ``path`` become ``text``."""

    path: str
    line: int
    kind: str
    start: int
    stop: int
    text: str

    def of(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def describe(self, source: bytes) -> str:
        """Return its place and its change, in one line."""
        old, new = (" ".join(text.split())[:60] for text in (source[self.start : self.stop].decode(), self.text))
        return f"{self.path}:{self.line} {self.kind}: {old} -> {new}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of the functions in a file."""
    tree = ast.parse(source)
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    constants: dict[str, list[str]] = {}  # of an enumeration, as the file uses them
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.isupper():
            names = constants.setdefault(ast.unparse(node.value), [])
            names += [] if node.attr in names else [node.attr]
    found = []
    for node in _in_functions(tree, inside=False):
        changes = list(_changes(node, constants))
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            node = node.test
            changes = [("condition negated", ast.UnaryOp(ast.Not(), node))]
        for kind, changed in changes:
            text = f"({ast.unparse(changed)})" if isinstance(changed, ast.expr) else ast.unparse(changed)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, stop = offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset
            mutant = Mutant(path, node.lineno, kind, start, stop, text)
            with contextlib.suppress(SyntaxError):  # not every change is valid everywhere
                compile(mutant.of(source), path, "exec")
                found.append(mutant)
    return found


def _in_functions(node: ast.AST, *, inside: bool) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements of functions, without docstrings, annotations, assertions and texts."""
    if inside and isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "pattern"):
            continue
        inner = inside or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not text and not isinstance(child, ast.JoinedStr | ast.Assert):
                yield from _in_functions(child, inside=inner)


def _changes(node: ast.AST, constants: dict[str, list[str]]) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                ops = [*node.ops[:place], _OTHER_COMPARISON[type(operator)](), *node.ops[place + 1 :]]
                yield "comparison flipped", ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            yield "and/or swapped", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not dropped", operand
        case ast.BinOp(left, ast.Add() | ast.Sub() as operator, right):
            yield "+/- swapped", ast.BinOp(left, ast.Sub() if isinstance(operator, ast.Add) else ast.Add(), right)
        case ast.Constant(bool() as value):
            yield "constant swapped", ast.Constant(not value)
        case ast.Constant(int() as value):
            yield "one more", ast.Constant(value + 1)
            yield "one less", ast.Constant(value - 1)
        case ast.Attribute(of, name) if len(names := constants.get(ast.unparse(of), [])) > 1 and name in names:
            yield "constant swapped", ast.Attribute(of, names[names.index(name) - 1])
        case ast.Assign(targets) if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            yield "statement dropped", ast.Pass()
        case _ if isinstance(node, _DROPPED):
            yield "statement dropped", ast.Pass()


def chosen(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` of the mutants, at most one per line."""
    mixed = random.Random(seed).sample(mutants, len(mutants))
    return list({(mutant.path, mutant.line): mutant for mutant in mixed}.values())[:count]


def drawn(lines: dict[str, int], count: int, seed: int) -> list[str]:
    """Draw files by their numbers of lines: those with every n-th line of all, so that each folder has its share."""
    step = sum(lines.values()) / count
    place, passed, found = random.Random(seed).random() * step, 0, []
    for path, number in sorted(lines.items()):
        passed += number
        if place < passed:
            found.append(path)
        while place < passed:
            place += step
    return found


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks or does not ignore. Links stay links."""
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], capture_output=True, check=True).stdout
    for name in filter(os.path.lexists, listed.decode().rstrip("\0").split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target / name, follow_symlinks=False)
    if ARCHIVE.exists():
        (target / "build").mkdir(exist_ok=True)
        (target / "build" / ARCHIVE.name).symlink_to(ARCHIVE)


def failed_test(tree: Path, tests: Sequence[str], seconds: float | None) -> str | None:
    """Run tests on a tree until the first failure. Return its name or another reason; None if all pass.

    Without a limit of ``seconds``, bytecode is written, for later runs, which write none.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "" if seconds is None else "1"}
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            lines = process.communicate(timeout=seconds)[0].decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end within {seconds:.0f} s"
    if process.returncode == 0:
        return None
    named = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return named[0][:150] if named else " ".join(lines[-1:])[:150]


def main(arguments: list[str]) -> int:
    """Run the mutants. Return 1 if any survives, 2 if the tests fail without a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="files, or folders for all files in them")
    parser.add_argument("--count", type=int, default=30, help="how many mutants")
    parser.add_argument("--draw", type=int, metavar="NUMBER", help="draw this many files, and COUNT mutants of each")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", type=int, action="append", metavar="NUMBER", help="only this one of them")
    parser.add_argument("--list", action="store_true", help="only say which they are")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given, tests = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    paths = [str(p) for m in map(Path, given.modules) for p in (sorted(m.rglob("*.py")) if m.is_dir() else [m])]
    sources = {path: Path(path).read_bytes() for path in paths}
    parts = [paths]
    if given.draw:
        lines = {path: len(source.splitlines()) for path, source in sources.items()}
        parts = [[path] for path in drawn(lines, given.draw, given.seed)]
    found = ([m for path in part for m in mutants_of(path, sources[path])] for part in parts)
    mutants = [mutant for each in found for mutant in chosen(each, given.count, given.seed)]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree, seconds = Path(folder), 0.0
        if not given.list:
            copy_tree(tree)
            started = time.monotonic()
            if (failed := failed_test(tree, tests, None)) is not None:
                print(f"the tests fail without a mutant: {failed}")
                return 2
            seconds = 3 * (time.monotonic() - started) + _PATIENCE
        for number, mutant in enumerate(mutants):
            source, failed = sources[mutant.path], ""
            if given.only and number not in given.only:
                continue
            if not given.list:
                file = tree / mutant.path
                original = file.replace(file.with_suffix(".original"))
                file.write_bytes(mutant.of(source))
                os.utime(file, (number, number))  # so that Python does not use bytecode of another version
                failed = failed_test(tree, tests, seconds)
                original.replace(file)
                survivors += failed is None
            word = "" if given.list else "SURVIVED  " if failed is None else "killed    "
            print(f"{number:3} {word}{mutant.describe(source)}{f'  [{failed}]' if failed else ''}", flush=True)
    if not given.list:
        print(f"{len(mutants)} mutants, seed {given.seed}: {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
