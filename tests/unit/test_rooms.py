"""The map of the tree is correct: DESIGN.md's tables and picture come from the code, and rooms keep their limits."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import spark_hvd

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("docs_rooms", ROOT / "docs" / "rooms.py")
assert _spec is not None
assert _spec.loader is not None
rooms = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rooms)

pytestmark = pytest.mark.slow  # it parses all files
REBUILD = "run python docs/rooms.py"


@pytest.fixture(scope="module")
def nodes() -> dict[str, list[ast.AST]]:
    """The syntax of every module, which takes seconds to parse, by its dotted name."""
    return {name: [*ast.walk(ast.parse(path.read_text()))] for name, path in rooms.modules().items()}


def test_the_picture_shows_the_imports_of_today() -> None:
    assert rooms.PICTURE.read_text() == rooms.picture(rooms.rooms()), REBUILD


def test_the_tables_say_what_the_signs_say() -> None:
    design = rooms.DESIGN.read_text()
    assert rooms.written(design) == design, REBUILD


def test_the_text_names_modules_and_classes_that_exist(nodes: dict[str, list[ast.AST]]) -> None:
    prose = rooms.DESIGN.read_text().partition("<!-- rooms end -->")[2].partition("## Dependencies")[0]
    parts = [name.split(".") for name in rooms.modules()]
    there = {".".join(part[start:]) for part in parts for start in range(len(part))} | {"__init__", *spark_hvd.__all__}
    named = re.findall(r"`([a-z_*]+(?:\.[a-z_*]+)*)`", prose)
    assert len(named) > 40
    assert [name for name in named if not fnmatch.filter(there, name)] == []
    defined = {node.name for each in nodes.values() for node in each if isinstance(node, ast.ClassDef)}
    assert {*re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", prose)} - defined == set()


def test_rooms_have_no_circle_and_no_more_than_fifteen_modules() -> None:
    assert min(rooms.levels(rooms.rooms()).values()) == 0
    modules = Counter(rooms.room_of(path) for path in rooms.modules().values() if path.name != "__init__.py")
    assert {room: count for room, count in modules.items() if count > 15} == {}


def test_a_circle_is_named() -> None:
    with pytest.raises(ValueError, match="a -> b -> a"):
        rooms.levels({"a": {"b"}, "b": {"a"}})


def test_no_file_of_the_product_has_more_than_400_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in rooms.modules().values()}
    assert {path: count for path, count in lines.items() if count > 400} == {}


MAKERS = re.compile("arange|empty|empty_strided|eye|full|linspace|ones|rand|randint|randn|randperm|tensor|zeros")


def test_tensors_of_ours_name_their_device(nodes: dict[str, list[ast.AST]]) -> None:
    """A program may have another default device; see tests/contract/test_defaults_of_torch.py."""
    unnamed = [
        f"{name}:{node.lineno}"
        for name, each in nodes.items()
        for node in each
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MAKERS.fullmatch(node.func.attr)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if not any(keyword.arg in ("device", "out") for keyword in node.keywords)
    ]
    assert unnamed == []


def test_no_class_name_means_two_things(nodes: dict[str, list[ast.AST]]) -> None:
    names = Counter(node.name for each in nodes.values() for node in each if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []


def test_every_room_has_a_sign_that_says_what_it_may_import() -> None:
    for room in rooms.rooms():
        assert rooms.sign(room), room
        assert room.endswith(".py") or "\n\nMay import " in rooms.sign(room), room


def test_a_public_method_has_a_docstring_or_overrides_one_of_ours_that_has(nodes: dict[str, list[ast.AST]]) -> None:
    bodies = [module.body for module, *_ in nodes.values() if isinstance(module, ast.Module)]
    classes = {node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)}

    def told(name: str, method: str) -> bool:
        own = [each for each in classes[name].body if isinstance(each, ast.FunctionDef) and each.name == method]
        bases = {ast.unparse(base).partition("[")[0] for base in classes[name].bases} & {*classes}
        return any(map(ast.get_docstring, own)) or any(told(base, method) for base in bases)

    methods = [
        (name, each.name)
        for name, node in classes.items()
        for each in node.body
        if isinstance(each, ast.FunctionDef) and not name.startswith("_") and not each.name.startswith("_")
    ]
    assert len(methods) > 1000
    assert [each for each in methods if not told(*each)] == []


def test_sections_of_docstrings_have_known_headings(nodes: dict[str, list[ast.AST]]) -> None:
    known = {"Args", "Attributes", "Example", "Raises", "Returns", "Yields"}
    headings = [
        (name, heading)
        for name, each in nodes.items()
        for node in each
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for heading in re.findall(r"^ *(\w+):$", ast.get_docstring(node) or "", re.MULTILINE)
    ]
    assert len(headings) > 900
    assert [each for each in headings if each[1] not in known] == []
