"""Hyperparameters with Optuna: ``spark_hvd.tuning.optimize(study, objective, n_trials=20, parallel=4)``.

Names are loaded on first use: Optuna is an extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_hvd.world.lazy import names_of

if TYPE_CHECKING:
    from spark_hvd.runner.tuning.optimize import TrialFailedError, TrialTracker, optimize

__all__ = ["TrialFailedError", "TrialTracker", "optimize"]


def _without_optuna() -> None:
    raise ImportError("spark_hvd.tuning needs Optuna: pip install optuna")


_NAMES = {"runner.tuning.optimize": "TrialFailedError TrialTracker optimize"}
__getattr__, __dir__ = names_of(__name__, _NAMES, {"optuna": _without_optuna})
