"""Trials of an Optuna study as runs on this machine: pruned, hanging, dying, interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_hvd import Reporting, run_local
from tests.conftest import wait_until

optuna: Any = pytest.importorskip("optuna")

from spark_hvd.tuning import TrialTracker, optimize  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_leaks")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(how: str, begun: Path) -> float:
    """Three epochs on two ranks. In the second, rank 1 may hang forever while rank 0 waits for it, or may die."""
    import torch

    import spark_hvd.torch as hvd

    for epoch in range(3):
        bar = hvd.progress(1, epoch=epoch, epochs=3)
        if hvd.rank() == 1 and epoch == 1 and how != "well":
            begun.touch()
            if how == "dies":
                os._exit(3)
            time.sleep(1000)
        hvd.allreduce(torch.ones(1), name="x")
        bar.step(loss=5.0 - epoch)
    return 1.0


class AtOnce(optuna.pruners.BasePruner):
    """Prunes trials that ask for it."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.params["how"] == "is pruned")


@pytest.mark.slow
def test_trials_that_hang_die_and_are_pruned_within_an_epoch(tmp_path: Path) -> None:
    ways = ["well", "dies", "is pruned", "hangs"]

    def objective(trial: Any) -> float:
        how = trial.suggest_categorical("how", ways)
        reporting = Reporting(tracker=TrialTracker(trial, "loss"))
        timeout = 5 if how == "hangs" else 600
        begun = tmp_path / str(trial.number)
        return run_local(train, (how, begun), num_proc=2, verbose=0, timeout=timeout, reporting=reporting)[0]

    study = optuna.create_study(pruner=AtOnce())
    for how in ways:
        study.enqueue_trial({"how": how})
    optimize(study, objective, 4, parallel=2)
    assert {trial.params["how"]: trial.state.name for trial in study.trials} == {
        "well": "COMPLETE",
        "dies": "FAIL",
        "is pruned": "PRUNED",
        "hangs": "FAIL",
    }
    told = {trial.params["how"]: trial for trial in study.trials}
    assert told["well"].intermediate_values == {1: 5.0, 2: 4.0, 3: 3.0}
    assert told["is pruned"].intermediate_values == {1: 5.0}
    assert told["dies"].user_attrs["error"].startswith("RankFailedError: ")
    assert told["hangs"].user_attrs["error"].startswith("RunTimeoutError: ")


def test_ctrl_c_stops_the_ranks_of_all_trials(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        return run_local(train, ("hangs", tmp_path / str(trial.number)), num_proc=2, verbose=0)[0]

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 120)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        optimize(study, objective, 10, parallel=2)
    other.join()
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]
