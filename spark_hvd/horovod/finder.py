"""Finds modules of ``horovod`` in the table of names, before Python searches for files."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any

from spark_hvd.horovod.names import PAGE, REFUSED, TABLE, Served

_CHOOSE = (
    "pip uninstall horovod. To use the other one, remove what selects ours: import spark_hvd.horovod, "
    "python -m spark_hvd.horovod, and spark-hvd run (use python script.py or torchrun instead)"
)


class NamesFinder(MetaPathFinder, Loader):
    """Creates the modules of the table. It never loads anything before ``horovod`` is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, if it is one of Horovod's.

        Raises:
            ModuleNotFoundError: Horovod has the module and we do not; the text names the alternative.
        """
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        if fullname == "horovod":
            _warn_about_other(sys.path)
        if fullname in TABLE:
            return ModuleSpec(fullname, self, is_package=True)
        why = next((why for name, why in REFUSED.items() if f"{fullname}.".startswith(f"{name}.")), None)
        raise ModuleNotFoundError(
            f"{fullname} is not in spark_hvd{'' if why is None else f': {why}'}. {PAGE} lists what is.",
            name=fullname,
        )

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Load our module behind it, and make its attributes available under Horovod's names."""
        name = module.__name__
        served = TABLE[name]
        home = None if served.home is None else _loaded(name, served.home)
        module.__doc__ = f"Horovod's names for what {served.home or 'spark_hvd'} has; see {PAGE}."
        if name == "horovod":
            from spark_hvd.horovod.start import switch_on

            switch_on()

        def __getattr__(attribute: str) -> Any:  # noqa: N807 - PEP 562
            value = _value(served, home, name, attribute)
            setattr(module, attribute, value)
            return value

        module.__dict__["__getattr__"] = __getattr__
        module.__dict__["__dir__"] = lambda: sorted({*module.__dict__, *_public(served, home)})


def install() -> None:
    """Make ``import horovod`` find our modules from now on, in this process.

    Raises:
        ImportError: Another ``horovod`` has been imported already.
    """
    if any(isinstance(each, NamesFinder) for each in sys.meta_path):
        return
    other = sys.modules.get("horovod")
    if other is not None and _is_other(getattr(other, "__spec__", None)):
        raise ImportError(
            f"spark_hvd.horovod: {other.__file__} has already been imported as horovod; a program can use only one of "
            f"them. Import spark_hvd.horovod first, or: {_CHOOSE}."
        )
    sys.meta_path.insert(0, NamesFinder())


def _warn_about_other(path: Sequence[str]) -> None:
    spec = PathFinder.find_spec("horovod", path)
    if _is_other(spec):
        assert spec is not None
        warnings.warn(
            f"horovod is spark_hvd's in this process; the one installed at {spec.origin or _folders(spec)} is not "
            f"used. To have only one of them: {_CHOOSE}.",
            stacklevel=2,
        )


def _is_other(spec: ModuleSpec | None) -> bool:
    """Return whether a spec is another Horovod: neither made here, nor from our wheel, which is one file."""
    if spec is None or isinstance(spec.loader, NamesFinder):
        return False
    folders = _folders(spec)
    if spec.origin is None:  # a folder of that name that is not a package
        return any(os.path.exists(os.path.join(folder, "common")) for folder in folders)
    return {entry for folder in folders for entry in os.listdir(folder)} - {"__pycache__"} != {
        "__init__.py",
        "ours.txt",
    }


def _folders(spec: ModuleSpec) -> list[str]:
    return [folder for folder in spec.submodule_search_locations or [] if os.path.isdir(folder)]


def _loaded(name: str, home: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if name not in REFUSED:
            raise
        raise ModuleNotFoundError(f"{name}: {REFUSED[name]} ({error}). See {PAGE}.", name=name) from error


def _value(served: Served, home: ModuleType | None, name: str, attribute: str) -> Any:
    if attribute in served.names:
        module, _, there = served.names[attribute].partition(":")
        return attrgetter(there)(importlib.import_module(module))
    if attribute == "__all__":
        return _public(served, home)
    if home is not None and not attribute.startswith("_") and hasattr(home, attribute):
        return getattr(home, attribute)
    if f"{name}.{attribute}" in TABLE:
        return importlib.import_module(f"{name}.{attribute}")
    raise AttributeError(
        f"{name}.{attribute}: spark_hvd has nothing of this name. {PAGE} lists the replacements for Horovod's names."
    )


def _public(served: Served, home: ModuleType | None) -> list[str]:
    theirs = [] if home is None else getattr(home, "__all__", None) or vars(home)
    return sorted({*served.names, *(name for name in theirs if not name.startswith("_"))} - {"__version__"})
