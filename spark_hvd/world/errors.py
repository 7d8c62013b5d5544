"""The exceptions of the collectives. Each survives pickling, because launchers carry them between processes."""

from __future__ import annotations


class NotInitializedError(ValueError):
    """A call that needs a world came before ``hvd.init()`` or after ``hvd.shutdown()``."""

    __module__ = "spark_hvd"

    def __init__(self, message: str = "spark_hvd has not been initialized; call hvd.init() first.") -> None:
        super().__init__(message)


class CollectiveError(RuntimeError):
    """A collective failed because a peer, the network or the backend did; the cause is chained.

    The world is of no use afterwards: shut down, and join a new one or end.
    """

    __module__ = "spark_hvd"


class MismatchError(ValueError, RuntimeError):
    """Ranks called one collective with things that do not fit together. The same message is raised on every rank.

    Nothing was exchanged but the descriptions, so the world stays usable. A RuntimeError too, as Horovod's errors are.
    """

    __module__ = "spark_hvd"


class PlanMismatchError(MismatchError):
    """Ranks wrapped optimizers whose parameters differ, so that their gradient buckets would not fit together."""

    __module__ = "spark_hvd"


class DuplicateNameError(ValueError, RuntimeError):
    """A collective was called under a name that this rank has under way already. The first call stays good.

    A RuntimeError too, as Horovod's errors are.
    """

    __module__ = "spark_hvd"


class HorovodMismatchError(MismatchError, CollectiveError):
    """A MismatchError in Horovod's dialect, where it is a HorovodInternalError too."""


class HorovodDuplicateNameError(DuplicateNameError, CollectiveError):
    """A DuplicateNameError in Horovod's dialect, where it is a HorovodInternalError too."""


class UnsupportedDtypeError(TypeError, ValueError):
    """A collective cannot compute with tensors of this dtype. A ValueError too, as Horovod's is."""


class StalledError(CollectiveError):
    """Some ranks did not call a collective within ``stall_timeout``; the text names them. The world goes on."""

    __module__ = "spark_hvd"


class HostsUpdatedInterrupt(Exception):  # noqa: N818  Horovod's name
    """The members of an elastic world are to change; raised on all ranks at the same commit, and no failure."""

    __module__ = "spark_hvd"
