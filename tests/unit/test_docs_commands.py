"""Commands in the documentation use programs, commands and options that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from spark_hvd.runner import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = re.compile(r"^(?:[A-Z_]+=\S+ )*(spark-hvd|make|python -m (?:spark_hvd|benchmarks)\b)")


def lines_of(text: str) -> Iterator[str]:
    """Yield every line that a reader may type: in shell blocks, indented ones, after a prompt, and in a sentence."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for language, block in fenced.findall(text):
        block = block.replace("\\\n", " ")
        if language == "sh":
            yield from block.splitlines()
        elif language == "text":
            yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
    rest = fenced.sub("", text)
    yield from (line.strip() for line in rest.splitlines() if line.startswith("    "))
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", rest)


def commands(page: Path) -> list[str]:
    found = [line.partition("  #")[0].strip() for line in lines_of(page.read_text())]
    return [line for line in found if OURS.match(line)]


def fault(line: str) -> str | None:
    """Return what is wrong with a command; None if nothing is."""
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"no target {word}" for word in words[1:] if word not in targets), None)
    if words[0] == "spark-hvd":
        return _fault_of_ours(words[1:])
    module, rest = words[2], words[3:]
    if module == "spark_hvd.runner.cli":
        return _fault_of_ours(rest)
    found = importlib.util.find_spec(f"{module}.__main__" if module == "benchmarks" else module)
    if found is None:
        return f"no module {module}"
    source = Path(str(found.origin)).read_text()
    options = [word.partition("=")[0] for word in rest if word.startswith("-")]
    return next((f"no option {option}" for option in options if f'"{option}"' not in source), None)


def _fault_of_ours(words: list[str]) -> str | None:
    command: click.Command = cli.main
    if words and not words[0].startswith("-"):
        if words[0] not in cli.main.commands:
            return f"no command {words[0]}"
        command, words = cli.main.commands[words[0]], words[1:]
    with click.Context(command) as context:
        context.allow_interspersed_args = command.context_settings.get("allow_interspersed_args", True)
        try:
            command.make_parser(context).parse_args(list(words))
        except click.UsageError as error:
            return error.format_message()
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    # an example of a refused command shows the refusal
    faults = {line: why for line in commands(page) if (why := fault(line)) and "-H a:2,b:2" not in line}
    assert faults == {}


def test_what_is_wrong_is_noticed() -> None:
    assert fault("spark-hvd run -np 4 --conf a=b train.py --its-own 3") is None
    assert fault("spark-hvd run --num-procs 4 train.py") is not None
    assert fault("spark-hvd examine") == "no command examine"
    assert fault("make demo") is None
    assert fault("make tea") == "no target tea"
    assert fault("OMP_NUM_THREADS=1 python -m benchmarks.train_step --round 3") == "no option --round"
