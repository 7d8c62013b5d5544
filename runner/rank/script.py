"""A Python script or module that runs as ``__main__`` on a rank, for ``spark-hvd run train.py``.

Ranks get the script's text, so the file need not exist on their hosts. The modules that it imports must exist there:
see ``--py-files``.
"""

from __future__ import annotations

import ast
import linecache
import os
import runpy
import sys
import tokenize
import types
from collections.abc import Sequence
from dataclasses import dataclass, field


class ScriptExitError(Exception):
    """The script called ``sys.exit`` with something other than success.

    Attributes:
        code: The exit code, 1 to 255.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"the script called sys.exit({self.code})"


@dataclass(frozen=True, slots=True)
class Script:
    """A script or module to run.

    Attributes:
        name: Absolute path of the script, or the name of a module.
        arguments: ``sys.argv`` after the script's name.
        folder: The folder to put first on ``sys.path``, on hosts that have it.
        text: The script's source; None for a module, which every host must have.
    """

    name: str
    arguments: tuple[str, ...]
    folder: str
    text: str | None = field(repr=False)

    @classmethod
    def read(cls, path: str, arguments: Sequence[str]) -> Script:
        """Read a script.

        Raises:
            OSError: It cannot be read.
            SyntaxError: It is not valid in this version of Python.
        """
        path = os.path.abspath(path)
        with tokenize.open(path) as file:
            text = file.read()
        compile(text, path, "exec", dont_inherit=True)  # raises for a typo before any rank starts
        return cls(path, tuple(arguments), os.path.dirname(path), text)

    def imported(self) -> set[str]:
        """Return the modules that the script's text imports anywhere; empty for a module."""
        nodes = [] if self.text is None else [*ast.walk(ast.parse(self.text))]
        imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        from_imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        return (
            imports
            | {node.module or "" for node in from_imports}
            | {f"{node.module}.{alias.name}" for node in from_imports for alias in node.names}
        )

    @property
    def makes_process_group(self) -> bool:
        """Whether the script's text calls ``init_process_group``, as programs for torchrun do."""
        nodes = [] if self.text is None else ast.walk(ast.parse(self.text))
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        return any("init_process_group" in (getattr(f, "attr", ""), getattr(f, "id", "")) for f in calls)

    @classmethod
    def module(cls, name: str, arguments: Sequence[str]) -> Script:
        """Make a script of a module, which then runs as with ``python -m``."""
        return cls(name, tuple(arguments), os.getcwd(), None)


def run_script(script: Script) -> None:
    """Run a script as ``__main__`` in this process.

    Raises:
        ScriptExitError: The script called ``sys.exit`` with something other than 0 or None.
        Exception: whatever the script raises.
    """
    import spark_hvd.horovod  # noqa: F401  a module that the script imports may import horovod
    from spark_hvd.runner.rank.process import exit_code

    if script.makes_process_group:
        _leave_as_torchrun()
    sys.argv = [script.name, *script.arguments]
    if os.path.isdir(script.folder):
        sys.path.insert(0, script.folder)
    try:
        if script.text is None:
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            _run_text(script.name, script.text)
    except SystemExit as left:
        code = exit_code(left.code)
        if code:
            # Keep the traceback, so that the report shows where the script called sys.exit.
            raise ScriptExitError(code).with_traceback(left.__traceback__) from None


def _leave_as_torchrun() -> None:
    """Leave the ranks' world, so that the script can make its own with the same store."""
    import torch.distributed as dist

    from spark_hvd.context import leave

    if dist.is_initialized():  # false in an elastic run, and if a caller has left the world
        leave.shutdown()
        os.environ |= {"TORCHELASTIC_RUN_ID": "spark_hvd", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _run_text(path: str, text: str) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main  # pickle and multiprocessing look here for the script's functions and classes
    # Let tracebacks show the script's lines even on hosts that do not have the file.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)
