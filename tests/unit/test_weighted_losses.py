"""Row weights: all ones change nothing, whatever the loss and its reduction; others count as they should."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.measure import ColumnFindings
from spark_hvd.estimators.torch.objective import Objective, ValidationSums
from spark_hvd.estimators.torch.weighted import LossReduction, Shares, reduction_seen
from spark_hvd.estimators.training.inputs import weights_of

ROWS, CLASSES = 12, 4
_generator = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, CLASSES, generator=_generator)
TARGETS = torch.randn(ROWS, CLASSES, generator=_generator)
NUMBERS = torch.tensor([0, 1, 2, 3, 0, 0, 2, -100, 1, 3, 1, -100])
INSIDE = NUMBERS.clamp(min=0)
PIXELS = torch.randn(ROWS, CLASSES, 2, 3, generator=_generator)
PIXEL_CLASSES = torch.randint(0, CLASSES, (ROWS, 2, 3), generator=_generator)
BY_CLASS = torch.tensor([1.0, 2.0, 0.5, 4.0])
SHARES, LOG_SHARES = SCORES.softmax(1), TARGETS.log_softmax(1)

CASES: list[tuple[Any, torch.Tensor, torch.Tensor]] = [
    *((nn.MSELoss(reduction=each), SCORES, TARGETS) for each in ("mean", "sum")),
    *((nn.HuberLoss(reduction=each), SCORES, TARGETS) for each in ("mean", "sum")),
    *((nn.KLDivLoss(reduction=each), LOG_SHARES, SHARES) for each in ("mean", "sum", "batchmean")),
    *(
        (nn.CrossEntropyLoss(weight, reduction=each, label_smoothing=smooth), SCORES, NUMBERS)
        for weight in (None, BY_CLASS)
        for each in ("mean", "sum")
        for smooth in (0.0, 0.1)
    ),
    (nn.CrossEntropyLoss(BY_CLASS, ignore_index=2), SCORES, INSIDE),
    (nn.CrossEntropyLoss(BY_CLASS), SCORES, SHARES),
    (nn.CrossEntropyLoss(BY_CLASS), PIXELS, PIXEL_CLASSES),
    (nn.NLLLoss(BY_CLASS), LOG_SHARES, NUMBERS),
    (nn.BCEWithLogitsLoss(BY_CLASS, pos_weight=BY_CLASS), SCORES, SHARES),
    (nn.MultiMarginLoss(weight=BY_CLASS), SCORES, INSIDE),
    (nn.MultiLabelSoftMarginLoss(BY_CLASS), SCORES, (TARGETS > 0).float()),
    (nn.PoissonNLLLoss(), SCORES, SHARES),
    (functional.mse_loss, SCORES, TARGETS),
    (functional.cross_entropy, SCORES, NUMBERS),
    (partial(functional.mse_loss, reduction="sum"), SCORES, TARGETS),
    (partial(partial(functional.cross_entropy, reduction="sum"), label_smoothing=0.1), SCORES, NUMBERS),
    (partial(functional.cross_entropy, weight=BY_CLASS, ignore_index=1), SCORES, INSIDE),
    (partial(functional.kl_div, reduction="batchmean"), LOG_SHARES, SHARES),
]


def both(loss: Callable[..., Any], output: torch.Tensor, label: torch.Tensor, weights: Any) -> tuple[Any, Any]:
    """Return the loss and the gradient of the output."""
    output = output.clone().requires_grad_()
    value = Objective([loss], None, 1)([output], [label], weights)
    value.backward()
    return value.detach(), output.grad


@pytest.mark.parametrize(("loss", "output", "label"), CASES)
def test_weights_of_one_change_nothing(loss: Callable[..., Any], output: torch.Tensor, label: torch.Tensor) -> None:
    for with_weights, plain in zip(
        both(loss, output, label, torch.ones(ROWS)), both(loss, output, label, None), strict=True
    ):
        torch.testing.assert_close(with_weights, plain)


def test_a_weight_counts_its_row() -> None:
    weights = torch.arange(ROWS).float()
    single = functional.cross_entropy(SCORES, NUMBERS, BY_CLASS, reduction="none")
    for reduction, divisor in (("sum", 1.0), ("mean", BY_CLASS[NUMBERS[NUMBERS >= 0]].sum())):
        loss, _ = both(nn.CrossEntropyLoss(BY_CLASS, reduction=reduction), SCORES, NUMBERS, weights)
        torch.testing.assert_close(loss, (single * weights).sum() / divisor)


class Halved(nn.MSELoss):
    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = super().forward(output, label)
        return loss if self.reduction == "none" else loss / 2


class Deaf(nn.MSELoss):
    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label) ** 2).mean()


def without_reduction(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (Halved(), "Halved is .* Expected the same"),
        (Deaf(), r"Deaf returns the shape \(\) for 12 rows"),
        (without_reduction, "without_reduction has no argument `reduction`"),
        (partial(without_reduction), "without_reduction has no argument `reduction`"),
    ],
)
def test_a_loss_that_cannot_be_weighed_is_refused(loss: Callable[..., Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        both(loss, SCORES, TARGETS, torch.ones(ROWS))


class SumInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MSELoss(reduction="sum")

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.inner(output, label)  # type: ignore[no-any-return]


def with_any_options(output: torch.Tensor, label: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.mse_loss(output, label, reduction="sum", **options)


@pytest.mark.parametrize(
    ("loss", "label", "kind"),
    [
        (lambda output, label: functional.mse_loss(output, label, reduction="sum"), TARGETS, "sum"),
        (nn.MSELoss(reduction="sum").forward, TARGETS, "sum"),
        (partial(nn.MSELoss(reduction="sum")), TARGETS, "sum"),
        (SumInside(), TARGETS, "sum"),
        (with_any_options, TARGETS, "sum"),
        (without_reduction, TARGETS, "mean"),
        (nn.MSELoss().forward, TARGETS, "mean"),
        (lambda output, label: functional.cross_entropy(output, label), INSIDE, "mean"),
        (lambda output, label: functional.cross_entropy(output, label, BY_CLASS), INSIDE, None),
        (lambda output, label: functional.cross_entropy(output, label), NUMBERS, None),
        (lambda output, label: (output - label).square().mean().sqrt(), TARGETS * torch.arange(ROWS)[:, None], None),
        (lambda output, label: (output - label).sum() * 0, TARGETS, None),
        (lambda output, label: (output.reshape(ROWS, -1) - label).mean(), TARGETS, None),
    ],
)
def test_what_a_loss_that_does_not_tell_does_with_its_rows(loss: Any, label: torch.Tensor, kind: str | None) -> None:
    assert not LossReduction.of(loss).is_from_torch
    assert reduction_seen(loss, SCORES, label) == kind
    if kind is not None:
        one = slice(0, 1)
        assert reduction_seen(loss, SCORES[one], label[one]) == kind, "of one row"


@pytest.mark.parametrize("odd", [-0.5, float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_none(odd: float) -> None:
    weights = [0.0, 1.0, odd, 2.0]
    text = rf"sample_weight_col='w' has 1 of 4 rows.* such as {odd:g}: expected numbers from 0\. .*df\.where\("
    with pytest.raises(DataError, match=text):
        weights_of("w", {"w": torch.tensor(weights)})
    found = [ColumnFindings(2), ColumnFindings(2)]
    for part, values in zip(found, (weights[:2], weights[2:]), strict=True):
        part.weigh("training", pa.array(values))
    with pytest.raises(DataError, match=text):
        ColumnFindings.together(found).check("w")


@pytest.mark.parametrize("kind", [pa.int32(), pa.float32(), pa.bool_()])
def test_weights_are_not_all_0(kind: pa.DataType) -> None:
    def found(*totals: int) -> ColumnFindings:
        measured = ColumnFindings(len(totals))
        for dataset, total in zip(("training", "validation"), totals, strict=True):
            measured.weigh(dataset, pa.array([0, total]).cast(kind))
        return measured

    ColumnFindings.together([found(0, 1), found(1, 0)]).check("w")
    with pytest.raises(DataError, match="sample_weight_col='w': all weights of the rows for validation are 0"):
        ColumnFindings.together([found(0, 0), found(1, 0)]).check("w")


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=BY_CLASS), nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")]
)
def test_a_validation_of_two_ranks(loss: nn.CrossEntropyLoss) -> None:
    """Means are those of all rows, even if a batch has ignored labels only; sums those of batches, weighted by rows."""
    numbers = NUMBERS.clone()
    numbers[5] = -100  # the only row of its batch
    steps = [((0, 5), (6, 9)), ((5, 6), (9, 12))]
    shares, total = Shares([loss], [None]), torch.zeros(4, dtype=torch.float64)
    for rank in range(2):
        sums = ValidationSums(["rows"], [1.0], torch.device("cpu"))
        for step in steps:
            (start, stop), rows = step[rank], sum(stop - start for start, stop in step)
            part, label = SCORES[start:stop], numbers[start:stop]
            weight = (stop - start) * 2 / rows
            found = shares.in_validation([loss(part, label)], [label], stop - start, weight, 2)
            sums.add(stop - start, *found, [torch.tensor(float(stop - start))])
        total += sums.values
    means = sums.means_of(total.tolist())
    whole = [torch.cat([torch.arange(*part) for part in step]) for step in steps]
    wanted = sum(float(loss(SCORES[rows], numbers[rows])) * len(rows) for rows in whole) / ROWS
    if loss.reduction == "mean":
        wanted = float(loss(SCORES, numbers))
    assert means["val_loss"] == pytest.approx(wanted, rel=1e-6)
    assert list(means) == ["val_loss", "val_rows"]
