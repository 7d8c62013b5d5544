"""Executes the notebooks of this folder and keeps their outputs, without what belongs to the machine they ran on.

python examples/notebooks/execute.py                # all of them; needs nbclient and ipykernel
python examples/notebooks/execute.py keras.ipynb    # those named
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Paths of this machine, and when something ran, are nobody's business, and would change with each execution.
_OF_THE_MACHINE = (
    (re.compile(r"/[^\s\"']*/ipykernel_\d+/\d+\.py"), "<cell>"),
    (re.compile(rf"{re.escape(sys.prefix)}/lib/python[^/]+/site-packages/"), ""),
    (re.compile(rf"{re.escape(sys.base_prefix)}/lib/"), ""),
    (re.compile(re.escape(f"{ROOT}/")), ""),
)


def execute(path: Path, timeout: int = 300) -> Any:
    """Run a notebook from its first cell to its last, as its outputs are to be kept.

    Args:
        path: The notebook; it is not written.
        timeout: Seconds that a cell may take.

    Returns:
        The notebook with new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed that is not meant to.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    client = NotebookClient(
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": str(HERE)}},
        # what the JVM writes past Python at its start is not of the notebook
        extra_arguments=["--IPKernelApp.capture_fd_output=False"],
    )
    client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = [_cleaned(output) for output in cell.outputs]
    notebook.metadata["executed"] = code_of(notebook)
    return notebook


def code_of(notebook: Any) -> str:
    """A digest of the code, by which it shows whether outputs are those of this code.

    Args:
        notebook: As nbformat reads it.
    """
    sources = "\n---\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def _cleaned(value: Any) -> Any:
    """The same without paths of this machine; pictures as they are."""
    if isinstance(value, str):
        for pattern, instead in _OF_THE_MACHINE:
            value = pattern.sub(instead, value)
        return value
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = each if key == "image/png" else _cleaned(each)
    return value


def main() -> None:
    """Execute those named, or all, and write them with their outputs."""
    for path in [HERE / name for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.relative_to(ROOT)} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
