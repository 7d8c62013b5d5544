"""The exceptions of the estimators. Each survives pickling, because ranks and Spark tasks raise them too."""


class EstimatorError(RuntimeError):
    """Base of the errors of a fit or a transform after its parameters were accepted."""

    __module__ = "spark_hvd.estimators"


class ModelError(EstimatorError, ValueError):
    """The model, its loss or its optimizer does not work on a batch of the data. Found before any rank is started."""

    __module__ = "spark_hvd.estimators"


class NotFiniteLossError(EstimatorError):
    """The loss became NaN or infinite; the text names rank, epoch and batch."""

    __module__ = "spark_hvd.estimators"
