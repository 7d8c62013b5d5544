"""The map of the tree: ``python docs/rooms.py`` draws docs/images/rooms.svg and writes DESIGN.md's tables of rooms.

Both come from the code: a room is a package, its sign is the docstring of its ``__init__``, its place in the picture
follows from the imports that its modules have. ``tests/unit/test_rooms.py`` compares.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
DESIGN = ROOT / "DESIGN.md"
MARKS = "<!-- rooms: written by python docs/rooms.py -->\n", "<!-- rooms end -->\n"
HOUSES = {
    "estimators": "estimators/: a DataFrame becomes a Spark ML model",
    "runner": "runner/: Spark tasks become ranks",
    "spark_hvd": "spark_hvd/: what a rank imports; knows nothing of Spark",
}
"""The three folders, top first: each imports only what is below it."""

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name."""
    found = {}
    for house in HOUSES:
        for path in sorted((ROOT / house).rglob("*.py")):
            parts = [*path.relative_to(ROOT).with_suffix("").parts]
            if house != "spark_hvd":
                parts.insert(0, "spark_hvd")
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports: at its top, in functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in [full if full in known else node.module] if name in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def room_of(path: Path) -> str:
    """The room of a file, such as "runner/watch/hang"; a file beside the rooms is a room of its own."""
    folder = path.parent.relative_to(ROOT).as_posix()
    return f"{folder}/{path.name}" if folder in HOUSES else folder


@functools.cache  # all files are read
def rooms() -> dict[str, set[str]]:
    """Every room, with the rooms that its modules import."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for path in known.values():
        if path.name == "__init__.py" and path.parent.name in HOUSES:
            continue  # the faces of the folders name what lies below them, lazily
        room = room_of(path)
        graph.setdefault(room, set()).update(room_of(known[name]) for name in imported(path, known))
    return {room: {other for other in below if other in graph and other != room} for room, below in graph.items()}


def levels(graph: Graph) -> dict[str, int]:
    """The floor of each room, 0 for those that import no other.

    Raises:
        ValueError: rooms import each other in a circle; it is named.
    """
    floor: dict[str, int] = {}

    def visit(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError(f"rooms import each other: {' -> '.join([*above[above.index(room) :], room])}")
        if room not in floor:
            floor[room] = max((visit(other, (*above, room)) + 1 for other in sorted(graph[room])), default=0)
        return floor[room]

    for room in sorted(graph):
        visit(room, ())
    return floor


def needed(graph: Graph) -> dict[str, set[str]]:
    """The graph without the edges that follow from others: a picture with all of them shows nothing."""

    def reach(room: str) -> set[str]:
        return graph[room].union(*(reach(other) for other in graph[room]))

    return {room: below - set().union(*(reach(other) for other in below)) for room, below in graph.items()}


def sign(room: str) -> str:
    """What a room says of itself: the docstring of its package, or of the file."""
    path = ROOT / room
    return ast.get_docstring(ast.parse((path if path.suffix else path / "__init__.py").read_text())) or ""


def sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    return " ".join(text.split("\n\n")[0].split())


WIDTH, BOX, HIGH, GAP, TOP = 1040, 150, 34, 26, 34


def picture(graph: Graph) -> str:
    """The rooms of each folder on their floors, with an arrow to each room that is imported, as SVG."""
    shapes: list[str] = []
    y = 10
    for house, title in HOUSES.items():
        own = {
            room: {other for other in below if other.startswith(house + "/")}
            for room, below in graph.items()
            if room.startswith(house + "/")
        }
        floors: defaultdict[int, list[str]] = defaultdict(list)
        for room, floor in levels(own).items():
            floors[floor].append(room)
        height = TOP + len(floors) * (HIGH + GAP)
        shapes.append(f'<rect x="10" y="{y}" width="{WIDTH - 20}" height="{height}" class="house"/>')
        shapes.append(f'<text x="24" y="{y + 22}" class="title">{escape(title)}</text>')
        places: dict[str, tuple[float, float]] = {}
        for row, floor in enumerate(sorted(floors, reverse=True)):
            step = (WIDTH - 40) / len(floors[floor])
            for column, room in enumerate(sorted(floors[floor])):
                places[room] = (20 + step * (column + 0.5), y + TOP + row * (HIGH + GAP) + HIGH / 2)
        for room, below in sorted(needed(own).items()):
            for other in sorted(below):
                (x1, y1), (x2, y2) = places[room], places[other]
                ends = f'x1="{x1:.0f}" y1="{y1 + HIGH / 2:.0f}" x2="{x2:.0f}" y2="{y2 - HIGH / 2:.0f}"'
                shapes.append(f'<line {ends} class="arrow"/>')
        for room, (x, middle) in sorted(places.items()):
            shapes += [
                f"<g><title>{escape(sentence(sign(room)))}</title>"
                f'<rect x="{x - BOX / 2:.0f}" y="{middle - HIGH / 2:.0f}" width="{BOX}" height="{HIGH}" class="room"/>'
                f'<text x="{x:.0f}" y="{middle + 5:.0f}" class="name">{room.removeprefix(house + "/")}</text></g>'
            ]
        y += height + 16
    style = (
        "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.name{text-anchor:middle}"
        ".house{fill:#f4f6fb;stroke:#9aa5c4}.room{fill:#fff;stroke:#3f51b5;rx:5}.arrow{stroke:#8a93b0;marker-end:url(#a)}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="Rooms and their imports"><style>{style}</style>'
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="#8a93b0"/></marker></defs><rect width="{WIDTH}" height="{y}" fill="#fff"/>'
    )
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def _cell(text: str) -> str:
    """A docstring's text as Markdown on one line."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")


def tables(graph: Graph) -> str:
    """Of each folder, a table: room, what it is for, what it may import and its doors."""
    count: defaultdict[str, int] = defaultdict(int)
    for path in modules().values():
        count[room_of(path)] += path.name != "__init__.py"
    blocks = []
    for house, title in HOUSES.items():
        rows = ["| room | modules | what it is for | rules and doors |", "|---|---|---|---|"]
        own = {room: floor for room, floor in levels(graph).items() if room.startswith(house + "/")}
        for room in sorted(own, key=lambda room: (-own[room], room)):
            purpose, _, rules = sign(room).partition("\n\n")
            cells = [f"[{room.removeprefix(house + '/')}]({room})", str(count[room]), purpose]
            cells.append(next((text for text in rules.split("\n\n") if text.startswith("May import")), ""))
            rows.append(f"| {' | '.join(_cell(text) for text in cells)} |")
        blocks.append(f"**{title[0]}{title[1:]}**\n\n" + "\n".join(rows) + "\n")
    return "\n".join(blocks)


def written(design: str) -> str:
    """DESIGN.md with the tables of today's rooms."""
    before, _, rest = design.partition(MARKS[0])
    return before + MARKS[0] + "\n" + tables(rooms()) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    PICTURE.write_text(picture(rooms()))
    DESIGN.write_text(written(DESIGN.read_text()))
