"""Learning rates of the estimators: a passed scheduler has all of its rates multiplied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as of_torch
from torch.optim.swa_utils import SWALR

from spark_hvd.checkpoint.format import check_plain
from spark_hvd.estimators.torch.learning_rate import check_described, described, load, make_scheduler, options_of
from spark_hvd.store.errors import CheckpointError

Made = Callable[[torch.optim.Optimizer], Any]
OWN = ("base_lrs", "min_lrs", "max_lrs", "eta_min")

SCHEDULERS: dict[str, Made] = {
    "cosine": lambda each: of_torch.CosineAnnealingLR(each, 8, eta_min=0.02),
    "restarting": lambda each: of_torch.CosineAnnealingWarmRestarts(each, 4, eta_min=0.02),
    "cyclic": lambda each: of_torch.CyclicLR(each, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "one cycle": lambda each: of_torch.OneCycleLR(each, max_lr=0.5, total_steps=13),
    "plateau": lambda each: of_torch.ReduceLROnPlateau(each, patience=1, min_lr=0.05, factor=0.8),
    "averaging": lambda each: SWALR(each, swa_lr=0.02, anneal_epochs=5),
    "sequential": lambda each: of_torch.SequentialLR(
        each, [of_torch.LinearLR(each, 0.1, 1, 3), of_torch.CosineAnnealingLR(each, 9, eta_min=0.01)], milestones=[3]
    ),
    "nested": lambda each: of_torch.ChainedScheduler(
        [
            of_torch.SequentialLR(
                each, [of_torch.LambdaLR(each, lambda n: 0.9**n), of_torch.ConstantLR(each, 0.5, 9)], milestones=[3]
            )
        ]
    ),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def rates(made: Made, factor: float) -> list[float]:
    mine = optimizer()
    scheduler: Any = make_scheduler(made(mine), mine, factor, 12)
    found = []
    for _ in range(12):
        found.append(mine.param_groups[0]["lr"])
        mine.step()
        scheduler.step(*([1.0] if isinstance(scheduler, of_torch.ReduceLROnPlateau) else []))
    return found


@pytest.mark.parametrize("made", SCHEDULERS.values(), ids=SCHEDULERS)
def test_all_rates_of_a_scheduler_are_multiplied(made: Made) -> None:
    assert rates(made, 2.0) == pytest.approx([2 * rate for rate in rates(made, 1.0)])


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    """Otherwise it would not change the rates of the optimizer that trains."""
    other = of_torch.StepLR(optimizer(), 1)
    for given in (other, lambda _: other):
        with pytest.raises(ValueError, match="lr_scheduler is a StepLR for another optimizer"):
            make_scheduler(given, optimizer(), 1.0, 10)


def begun(made: Any, size: float) -> tuple[torch.optim.Optimizer, Any]:
    mine = optimizer()
    return mine, make_scheduler(made, mine, size, 12)


def fixed(mine: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    group, inner = mine.param_groups[0], getattr(scheduler, "_schedulers", [scheduler])
    of_group = {name: group[name] for name in group if name.endswith("_lr")}
    return [of_group, *({name: vars(each)[name] for name in OWN if name in vars(each)} for each in inner)]


@pytest.mark.parametrize("made", SCHEDULERS.values(), ids=SCHEDULERS)
def test_rates_of_a_function_are_those_of_a_run_that_begins_with_these_ranks(made: Made) -> None:
    mine, scheduler = begun(made, 2.0)
    state = {"optimizer": mine.state_dict(), "scheduler": scheduler.state_dict()}
    state = copy.deepcopy(state)
    mine, scheduler = begun(made, 4.0)
    expected = copy.deepcopy(fixed(mine, scheduler))
    load(made, mine, scheduler, state, 2.0)
    assert fixed(mine, scheduler) == expected
    assert mine.param_groups[0]["lr"] == pytest.approx(2 * state["optimizer"]["param_groups"][0]["lr"])


def of_run(optimizer: torch.optim.Optimizer, model: torch.nn.Module, scheduler: Any = None) -> dict[str, Any]:
    return described(model, [optimizer], [scheduler] if scheduler else [], options_of(optimizer))


def test_a_checkpoint_of_another_optimizer_or_scheduler() -> None:
    """torch loads Adam's state into AdamW, which then acts as Adam, and one layer's state into another."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    adam = torch.optim.Adam(model[0].parameters(), lr=0.1)
    saved = of_run(adam, model)
    check_described(saved, of_run(torch.optim.Adam(model[0].parameters(), lr=0.1), model), "r")
    check_described(None, saved, "r")  # written before this was known
    others = {
        "optimizer: Adam then, AdamW now": of_run(torch.optim.AdamW(model[0].parameters()), model),
        r"parameters .*0.weight.*then, .*1.weight.*now": of_run(torch.optim.Adam(model[1].parameters()), model),
        "lr_scheduler: None then, StepLR now": of_run(adam, model, of_torch.StepLR(adam, 1)),
    }
    for text, other in others.items():
        with pytest.raises(CheckpointError, match=f"run_id='r' resumes from the state of another {text}"):
            check_described(saved, other, "r")


def test_options_that_a_checkpoint_overrides_are_told() -> None:
    model = torch.nn.Linear(2, 1)
    before = of_run(torch.optim.Adam(model.parameters(), lr=0.1), model)
    lr = torch.tensor(0.5, dtype=torch.float64)
    now = of_run(torch.optim.Adam(model.parameters(), lr=lr, weight_decay=0.01), model)
    with pytest.warns(UserWarning, match="keeps the options of its checkpoint") as told:
        next_saved = check_described(before, now, "r")
    first, second = (str(each.message) for each in told)
    assert "began with lr=0.1: lr=0.5 of the present optimizer has no effect" in first
    assert "weight_decay=0: weight_decay=0.01" in second
    assert next_saved["options"] == before["options"], "which are still in force"


def test_options_of_numpy_fit_into_a_checkpoint() -> None:
    rate, beta = np.logspace(-4, -2, 5)[2], np.float64(0.9)
    made = torch.optim.Adam(torch.nn.Linear(2, 1).parameters(), lr=rate, betas=(beta, 0.999))
    (group,) = options_of(made)
    assert (group["lr"], group["betas"]) == (1e-3, (0.9, 0.999))
    made.param_groups[0]["of another class"] = made.param_groups[0]["of another class, in a tuple"] = (object(),)
    check_plain(options_of(made), "options")


def test_state_of_higher_precision_than_its_parameter_is_loaded_as_it_was() -> None:
    """torch casts it to the parameter's dtype."""
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], lr=0.1) for _ in "ab")
    master = torch.tensor([1.001, 2.002])
    first.state[first.param_groups[0]["params"][0]] = {"master": master, "kind": "fp32"}
    load(None, second, None, {"optimizer": first.state_dict(), "scheduler": None}, 1.0)
    loaded = second.state[second.param_groups[0]["params"][0]]
    assert torch.equal(loaded["master"], master)
    assert loaded["kind"] == "fp32"
