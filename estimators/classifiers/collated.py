"""``CollatedEstimator``: the fit that all classifiers share."""

from __future__ import annotations

from typing import ClassVar

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.fit.trial import ROWS
from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import Parameter
from spark_hvd.estimators.params.tables import TORCH
from spark_hvd.estimators.torch.estimator import TorchEstimator
from spark_hvd.estimators.torch.trial import try_batch
from spark_hvd.estimators.training.spec import TrainSpec


class CollatedEstimator(TorchEstimator):
    """A TorchEstimator whose batches are what ``collate`` makes of rows of any types, in ranks.

    The model gets the tensors of a batch in their order, but for those called as one of ``label_cols``.
    """

    _table: ClassVar = (
        *TORCH,
        Parameter("collate", None, c.function, "Makes a batch of a RecordBatch and `training`."),
    )

    def _imports(self, settings: Settings) -> list[str]:
        # Those of the model's code as well, which take seconds for Transformers.
        code = {type(module).__module__ for module in settings["model"].modules()}
        return [
            *super()._imports(settings),
            *sorted(n for n in code if n.partition(".")[0] in ("transformers", "peft")),
        ]

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        if not len(batch[spec.labels[0].column.name]):
            raise DataError(f"none of the first {ROWS} rows can be trained on: all were skipped. Look at the column")
        return try_batch(spec, plan.objects, batch)
