"""Classes of a label column: predictions are the values that the column has."""

from __future__ import annotations

import math

import torch

from spark_hvd.estimators.classifiers.labels import Labels


def test_numbers_are_predicted_as_they_are() -> None:
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [math.nan, 0.0]])
    predicted, _ = Labels("grade", "double", 2, (0.1, 1.1)).predicted(scores[:2], 0.5)
    assert predicted.tolist() == [1.1, 0.1]
    predicted, _ = Labels("grade", "decimal(3,1)", 2, (0.1, 1.1)).predicted(scores, 0.5)
    assert predicted == [1.1, 0.1, None]
    predicted, _ = Labels("id", "bigint", 2, (3, 2**53 + 1)).predicted(scores[:2], 0.5)
    assert predicted.tolist() == [2**53 + 1, 3]
