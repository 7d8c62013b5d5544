"""Autotuning of training steps: rank 0 tries values during the first steps, and all ranks switch at the same step.

What is tried: the size of the buckets, where the ranks share a host the way in which they are reduced (Gloo or shared
memory), the number of Gloo's threads, and the fusion threshold of named collectives. The score is bytes of gradients a
second, of whole steps, so that what overlaps with computation counts for what it costs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spark_hvd.torch.optimizer.buckets import MEGABYTE
from spark_hvd.torch.optimizer.search import Autotuner, Knob
from spark_hvd.transport.exchange import exchange
from spark_hvd.world.config import Config

if TYPE_CHECKING:
    from spark_hvd.engine.engine import Engine
    from spark_hvd.torch.optimizer.reducer import GradientReducer

_log = logging.getLogger("spark_hvd")

GLOO_THREADS = (1, 2, 3, 4)
"""What is tried."""


@dataclass(frozen=True, slots=True)
class TunedGroups:
    """The process groups that a tuned reducer chooses from.

    Attributes:
        own: The reducer's first one.
        by_threads: One for each of GLOO_THREADS; empty where Gloo carries nothing.
    """

    own: dist.ProcessGroup
    by_threads: Sequence[dist.ProcessGroup]


class StepTuner:
    """Tunes one optimizer's reducer; every rank has one, rank 0's decides.

    Args:
        reducer: What is tuned.
        groups: The process groups to choose from.
        device: A device that the reducer's group can exchange small facts on.
        engine: For the fusion threshold, on the rank that coordinates the world.
        config: Numbers of samples and steps, and the log.
        bucket_cap_mb: The value to start with, and whether the user has set it, so that it stays.
        in_memory: Whether shared memory can be used.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        groups: TunedGroups,
        device: torch.device,
        engine: Engine,
        config: Config,
        bucket_cap_mb: tuple[float, bool],
        in_memory: bool,
    ) -> None:
        self._reducer = reducer
        self._groups = groups
        self._device = device
        self._engine = engine
        self._steps_per_sample = config.autotune_steps_per_sample
        self._steps = 0
        self._began = 0.0
        cap, cap_is_fixed = bucket_cap_mb
        start = {
            "bucket_cap_mb": cap,
            "fusion_threshold_mb": max(1.0, config.fusion_threshold / MEGABYTE),
            "shared_memory": float(in_memory),
            "gloo_threads": 2.0,  # torch's own choice
        }
        fixed = {"bucket_cap_mb": cap} if cap_is_fixed else {}
        if not in_memory:
            fixed["shared_memory"] = 0.0
        if not groups.by_threads:
            fixed["gloo_threads"] = start["gloo_threads"]
        self._tuner: Autotuner | None = None
        if dist.get_rank(groups.own) == 0:
            self._tuner = Autotuner(
                [
                    Knob("bucket_cap_mb", 0.5, 128.0, log=True),
                    Knob("fusion_threshold_mb", 1.0, 256.0, log=True),
                    Knob("shared_memory", 0.0, 1.0, integer=True),
                    Knob("gloo_threads", GLOO_THREADS[0], GLOO_THREADS[-1], log=True, integer=True),
                ],
                start,
                warmup_samples=config.autotune_warmup_samples,
                samples=config.autotune_max_samples,
                log_path=config.autotune_log,
                fixed=fixed,
            )

    def pause(self) -> None:
        """A rank has joined: what a step takes now tells little, and not all ranks make it. The sample begins anew."""
        self._steps = 0

    def stepped(self) -> None:
        """A step has ended; after every so many, rank 0 tells all what to use next."""
        if self._steps == 0:
            self._began = time.perf_counter()
        self._steps += 1
        if self._steps <= self._steps_per_sample:
            return
        seconds = time.perf_counter() - self._began
        self._steps = 0
        values, done = None, False
        if self._tuner is not None:
            values = self._tuner.record(self._reducer.nbytes * self._steps_per_sample / seconds)
            done = self._tuner.done
        # This is the one moment at which all ranks are known to be between the same two steps.
        values, done = exchange([values, done], self._groups.own, self._device)[0]
        if values is not None:
            self._use(values)
        if done:
            self._reducer.tuner = None
            if self._tuner is not None:
                chosen = ", ".join(f"{name}={value:g}" for name, value in self._tuner.current.items())
                _log.info("autotuning has ended: %s", chosen)

    def _use(self, values: dict[str, float]) -> None:
        in_memory = bool(values["shared_memory"])
        group = self._groups.own
        if self._groups.by_threads and not in_memory:
            group = self._groups.by_threads[GLOO_THREADS.index(int(values["gloo_threads"]))]
        cap = int(values["bucket_cap_mb"] * MEGABYTE)
        self._reducer.replan(cap, group, in_memory=in_memory)
        if dist.get_rank() == 0:
            threshold = int(values["fusion_threshold_mb"] * MEGABYTE)
            self._engine.tune(replace(self._engine.config, fusion_threshold=threshold))
