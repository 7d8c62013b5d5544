"""``CollatedEstimator``: the fit that all classifiers share."""

from __future__ import annotations

from typing import Any, ClassVar

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
from spark_hvd.runner.config import PRELOAD


class CollatedEstimator(TorchEstimator):
    """A TorchEstimator whose batches are what ``collate`` makes of rows of any types, in ranks.

    The model gets the tensors of a batch in their order, but for those called as one of ``label_cols``.
    """

    _table: ClassVar = (
        *TORCH,
        Parameter("collate", None, c.function, "Makes a batch of a RecordBatch and `training`."),
    )

    def _derived(self, settings: Settings) -> dict[str, Any]:
        # Ranks are forked from a process that has the model's code imported, which takes seconds for Transformers.
        code = {type(module).__module__ for module in settings["model"].modules()}
        slow = sorted(name for name in code if name.partition(".")[0] in ("transformers", "peft"))
        return {"env": {PRELOAD: ",".join(slow)}} if slow else {}

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        if not len(batch[spec.labels[0].column.name]):
            raise DataError(f"none of the first {ROWS} rows can be trained on: all were skipped. Look at the column")
        return try_batch(spec, plan.objects, batch)
