"""The exceptions of the collectives. Each survives pickling, because launchers carry them between processes."""

from __future__ import annotations


class NotInitializedError(ValueError):
    """A call that needs a world came before ``hvd.init()`` or after ``hvd.shutdown()``."""

    __module__ = "spark_hvd"

    def __init__(self, message: str = "spark_hvd has not been initialized; call hvd.init() first.") -> None:
        super().__init__(message)


class CollectiveError(RuntimeError):
    """A collective failed because a peer, the network or the backend failed; the cause is chained.

    The world can no longer be used: shut down, and join a new one or exit.
    """

    __module__ = "spark_hvd"


class MismatchError(ValueError, RuntimeError):
    """Ranks called one collective with arguments that do not match. Raised on every rank, with the same message.

    Only the descriptions were exchanged, so the world stays usable. Also a RuntimeError, like Horovod's errors.
    """

    __module__ = "spark_hvd"


class PlanMismatchError(MismatchError):
    """Ranks wrapped optimizers whose parameters differ, so their gradient buckets would not match."""

    __module__ = "spark_hvd"


class DuplicateNameError(ValueError, RuntimeError):
    """A collective was called under a name that is already under way on this rank. The first call is unaffected.

    Also a RuntimeError, like Horovod's errors.
    """

    __module__ = "spark_hvd"


class HorovodMismatchError(MismatchError, CollectiveError):
    """A MismatchError in Horovod's dialect, in which it is also a HorovodInternalError."""


class HorovodDuplicateNameError(DuplicateNameError, CollectiveError):
    """A DuplicateNameError in Horovod's dialect, in which it is also a HorovodInternalError."""


class UnsupportedDtypeError(TypeError, ValueError):
    """A collective cannot compute with tensors of this dtype. Also a ValueError, like Horovod's error."""


class StalledError(CollectiveError):
    """Some ranks did not call a collective within ``stall_timeout``; the text names them. The world stays usable."""

    __module__ = "spark_hvd"


class HostsUpdatedInterrupt(Exception):  # noqa: N818  Horovod's name
    """The members of an elastic world are about to change. Raised on all ranks at the same commit; not a failure."""

    __module__ = "spark_hvd"
