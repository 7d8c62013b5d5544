"""Hyperparameters with Optuna: ``spark_hvd.tuning.optimize(study, objective, n_trials=20, parallel=4)``.

Names are loaded on first use: Optuna is an extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.runner.tuning.optimize import TrialFailedError, TrialTracker, optimize

__all__ = ["TrialFailedError", "TrialTracker", "optimize"]

_HOMES = {"TrialFailedError": "optimize", "TrialTracker": "optimize", "optimize": "optimize"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(importlib.import_module(f"spark_hvd.runner.tuning.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "optuna":
                raise ImportError("spark_hvd.tuning needs Optuna: pip install optuna") from error
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
