"""The settings of named collectives, in one frozen object; rank 0's apply to all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

DIALECTS = ("spark_hvd", "horovod")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings that `init` accepts besides ranks and process sets.

    Raises:
        ValueError: A value is out of its range.
    """

    fusion_threshold: int = 128 << 20
    """Maximum bytes of collectives that are sent together if they are ready at the same time; 0: never."""
    cache_capacity: int = 1024
    """Number of names that get a number, so that negotiating them again costs one bit; 0: none."""
    shared_memory: bool = True
    """Whether ranks on one host may reduce small and large tensors in shared memory; all ranks must agree."""
    hierarchical_allreduce: bool = True
    """Whether hosts with several ranks reduce in CPU memory first, then over the network; all ranks must agree."""
    stall_warning: float | None = 60.0
    """Seconds after which rank 0 logs which ranks a collective waits for; None: never."""
    stall_timeout: float | None = None
    """Seconds after which such a collective fails; None: the world's timeout, by default half an hour."""
    timeline: str | None = None
    """File for a timeline that is recorded from the start, as by start_timeline()."""
    timeline_mark_cycles: bool = False
    """Whether the timeline marks each round of decisions."""
    dialect: str = "spark_hvd"
    """"horovod" for Horovod's numbers and errors; the same on all ranks."""
    autotune: bool = False
    """Whether bucket sizes and the fusion threshold are tuned in the first steps."""
    autotune_log: str | None = None
    """CSV file for the values that were tried."""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise ValueError(f"dialect={self.dialect!r}: expected {' or '.join(map(repr, DIALECTS))}.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name}={value!r}: expected {least} or more.")

    @property
    def is_horovod(self) -> bool:
        """Whether the dialect is Horovod's."""
        return self.dialect == "horovod"

    def kept_text(self, wanted: Config) -> str | None:
        """Return a warning if ``wanted`` has values that a world which exists already cannot adopt; else None."""
        kept = {name: getattr(wanted, name) for name in _VARIABLES if getattr(self, name) != getattr(wanted, name)}
        if not kept:
            return None
        asked = ", ".join(f"{name}={value!r}" for name, value in kept.items())
        variables = " ".join(f"{_VARIABLES[name]}={value:d}" for name, value in kept.items())
        return (
            f"hvd.init({asked}): this world was joined already, and keeps what it was joined with; only process sets "
            f"and worlds that come later have the new value. To have it here, start the ranks with {variables} in "
            f"their environment, or call hvd.shutdown() and hvd.init({asked}) on every rank."
        )


_VARIABLES = {
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "shared_memory": "SPARK_HVD_SHARED_MEMORY",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
}
"""The environment variables of the values that are read on joining."""
_LEAST = {
    "fusion_threshold": 0,
    "cache_capacity": 0,
    "stall_warning": 0,
    "stall_timeout": 0,
    "autotune_warmup_samples": 0,
    "autotune_steps_per_sample": 1,
    "autotune_max_samples": 1,
}

NAMES = tuple(field.name for field in fields(Config))
