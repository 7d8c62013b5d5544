"""Says what the benchmarks take, and runs them: each prints its tables, and gets a picture of them.

`python -m benchmarks [all | NAME [its options]]`

Without a name only the list is printed. What a benchmark prints is kept in out/benchmarks/NAME.txt, its picture is
NAME.png beside that. `all` goes on where one fails, and says at the end which have.

A benchmark is a file of this folder with ``if __name__ == "__main__"``. It declares about how long it takes, and what
else it needs: ``MINUTES = 2``; ``NEEDS_ROOT = True``; ``NEEDS_GPU = True``. One of 0 minutes measures nothing, and is
not among all.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OUT = FOLDER.parent / "out" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Program:
    """A benchmark, as its file says.

    Attributes:
        name: Of the module.
        about: The first line of what it says of itself.
        minutes: About how long it takes; None where it does not say.
        needs_root: Whether it makes hosts out of network namespaces.
        needs_gpu: Whether it takes hours without an NVIDIA GPU.
    """

    name: str
    about: str
    minutes: float | None
    needs_root: bool
    needs_gpu: bool = False

    @property
    def left_out(self) -> str:
        """Why it is not among all here; "" if it is."""
        if self.minutes == 0:
            return "measures nothing"
        if self.needs_gpu and not os.path.exists("/dev/nvidiactl"):
            return "needs a GPU"
        return "needs root" if self.needs_root and os.geteuid() != 0 else ""

    def run(self, options: Sequence[str] = (), out: Path = OUT) -> int:
        """Run it and draw what it prints; returns its exit status."""
        from benchmarks.bars import draw

        command = [sys.executable, "-u", "-m", f"{__package__}.{self.name}", *options]
        lines = []
        out.mkdir(parents=True, exist_ok=True)
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=FOLDER.parent) as process,
            (out / f"{self.name}.txt").open("w") as kept,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                kept.write(line)
                lines.append(line)
        picture = out / f"{self.name}.png"
        picture.unlink(missing_ok=True)
        if process.returncode == 0 and draw("".join(lines), picture):
            print(f"\n{picture}", flush=True)
        return process.returncode


def programs(folder: Path = FOLDER) -> list[Program]:
    """The benchmarks of a folder by name; none is imported."""
    found = []
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        if path.stem == "__main__" or '\nif __name__ == "__main__":' not in text:
            continue
        tree = ast.parse(text)
        said = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        minutes = said.get("MINUTES")
        known = float(minutes) if isinstance(minutes, int | float) else None
        found.append(Program(path.stem, about, known, bool(said.get("NEEDS_ROOT")), bool(said.get("NEEDS_GPU"))))
    return found


def listing(every: Sequence[Program]) -> str:
    """What all take, as a table, and the sum."""
    lines = ["| benchmark | about, min | what |", "|---|---:|---|"]
    for each in every:
        minutes = "?" if each.minutes is None else f"{each.minutes:g}"
        left_out = f" ({each.left_out}: not among all)" if each.left_out else ""
        lines.append(f"| {each.name} | {minutes} | {each.about}{left_out} |")
    ran = [each for each in every if not each.left_out]
    unknown = sum(each.minutes is None for each in ran)
    more = f", and {unknown} that do not say" if unknown else ""
    total = sum(each.minutes or 0 for each in ran)
    return "\n".join([*lines, f"\n{len(ran)} of {len(every)}: about {total:.0f} minutes{more}. Needs a quiet machine."])


def run_all(every: Sequence[Program], out: Path = OUT) -> int:
    """Run one after the other.

    Returns:
        1 if one has failed, else 0.
    """
    failed = []
    for each in every:
        if each.left_out:
            continue
        print(f"\n== {each.name}", flush=True)
        began = time.monotonic()
        if status := each.run(out=out):
            failed.append(f"{each.name} (exit status {status})")
        said = "it does not say" if each.minutes is None else f"it says {each.minutes:g}"
        print(f"took {(time.monotonic() - began) / 60:.1f} min; {said}", flush=True)
    print(f"\nFailed: {', '.join(failed)}" if failed else "\nNone has failed.")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Run what is named; returns the exit status."""
    every = programs()
    name, *options = arguments or [""]
    named = {each.name: each for each in every}
    if name in named:
        return named[name].run(options)
    if name not in ("", "all") or options:
        print(f"{' '.join(arguments)}: expected all, or one of {', '.join(named)} and its options", file=sys.stderr)
        return 2
    print(listing(every), flush=True)
    return run_all(every) if name else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
