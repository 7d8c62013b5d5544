"""Which lines written for CUDA have run: those that name a part of it, and those in branches that they guard.

Modules are compiled with a mark before each such line. Other lines cost nothing more, in whatever thread they run.
"""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("spark_hvd", "runner/rank", "estimators/training", "estimators/transform")
"""Where tensors are on devices. What other modules say about GPUs is settings and numbers, and runs without any."""
ELSEWHERE = ("spark_hvd/transport/mpi", "spark_hvd/mxnet", "spark_hvd/jax")
"""What needs MPI, MXNet or JAX on a device, which nothing here simulates."""
_WORDS = re.compile(r"cuda|on_gpu|nccl|record_stream|pinned|pin_memory|has_kernels", re.IGNORECASE)
_MARK = "__reached__"

reached: set[tuple[str, int]] = set()


def written_for_cuda(path: Path) -> list[ast.stmt]:
    """Return the lines of a file that are written for CUDA, from the tree of :func:`parsed`."""
    return list(_marked(parsed(path).body, inside=False))


def parsed(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text())


def files() -> list[str]:
    """Return all files that may contain such lines, below the project's folder."""
    found = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return sorted(
        path for path in found if not path.startswith((*ELSEWHERE, "spark_hvd/runner", "spark_hvd/estimators"))
    )


def _marked(body: Sequence[ast.stmt], *, inside: bool) -> Iterator[ast.stmt]:
    for line in body:
        nested = [part for name in ("body", "orelse", "finalbody") for part in [getattr(line, name, [])] if part]
        nested += [handler.body for handler in getattr(line, "handlers", [])]
        if isinstance(line, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
            for part in nested:
                yield from _marked(part, inside=False)
            continue
        says = _says(line)
        if (inside or says) and not isinstance(line, ast.Try):
            yield line
        denied = isinstance(line, ast.If) and any(isinstance(each, ast.Not) for each in ast.walk(line.test))
        for part in nested:
            otherwise = part is getattr(line, "orelse", None) or denied
            yield from _marked(part, inside=inside or (says and not otherwise))


def _says(line: ast.stmt) -> bool:
    """Return whether a line, without nested lines and types, names a part of CUDA."""
    heads: list[Any] = [line]
    if isinstance(line, ast.If | ast.While):
        heads = [line.test]
    elif isinstance(line, ast.For):
        heads = [line.iter]
    elif isinstance(line, ast.With):
        heads = list(line.items)
    elif isinstance(line, ast.AnnAssign):
        heads = [line.value] if line.value is not None else []
    elif isinstance(line, ast.Try):
        heads = []
    for head in heads:
        for node in ast.walk(head):
            for key in ("id", "attr", "arg"):
                if _WORDS.search(str(getattr(node, key, ""))):
                    return True
            if isinstance(node, ast.Constant) and node.value == "cuda":
                return True
    return False


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        path = Path(self.get_filename(fullname))
        name = path.resolve().relative_to(ROOT).as_posix()
        tree = parsed(path)
        places = {id(line) for line in _marked(tree.body, inside=False)}
        for node in ast.walk(tree):
            for key in ("body", "orelse", "finalbody"):
                body = getattr(node, key, None)
                if isinstance(body, list):
                    setattr(node, key, [each for line in body for each in _with_mark(line, places, name)])
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _MARK, reached.add)
        super().exec_module(module)


def _with_mark(line: ast.stmt, places: set[int], name: str) -> list[ast.stmt]:
    if id(line) not in places:
        return [line]
    mark = ast.parse(f"{_MARK}(({name!r}, {line.lineno}))").body[0]
    for node in ast.walk(mark):
        ast.copy_location(node, line)
    return [mark, line]


class _Finder:
    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("spark_hvd"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        if Path(spec.origin).resolve().relative_to(ROOT).as_posix() in watched:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


watched: dict[str, list[int]] = {}
"""Mark the lines of each file that are written for CUDA."""


def watch() -> None:
    """Observe all modules of the package that are imported from now on."""
    for name in files():
        lines = [line.lineno for line in written_for_cuda(ROOT / name)]
        if lines:
            watched[name] = lines
    sys.meta_path.insert(0, _Finder)
