"""The gradient reducer: it sums gradients bucket by bucket during backward, with no negotiation per step.

Hooks count gradients as autograd produces them. A bucket that has all its gradients is launched, strictly in plan
order, so that all ranks start the same all-reduces in the same order. At the end of backward the reducer waits for them
("eager"), so clipping and loss scaling need no extra call. If some rank's first backward left parameters without a
gradient, waiting there could block one rank on another that must first run a second backward or a collective of its
own. In that case the reducer waits only in `synchronize` ("late").

The first step is for learning: nothing is launched until one exchange has told all ranks one rank's order of readiness
and the parameters with sparse gradients.

A rank that has called join() shadows the others: it takes part in the same collectives, but contributes nothing.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from spark_hvd.collectives.tracing import Tracing
from spark_hvd.torch.optimizer.arguments import fingerprints, warn_about_start
from spark_hvd.torch.optimizer.buckets import ParamSpec
from spark_hvd.torch.optimizer.flat import FlatBucket, Reduction
from spark_hvd.torch.optimizer.hooks import GradientCounts, NoBucket, Watch, make_hook, overrun, remove_all
from spark_hvd.torch.optimizer.memory import Marks
from spark_hvd.torch.optimizer.participation import Presence
from spark_hvd.torch.optimizer.plan import GradientPlan, require_same
from spark_hvd.torch.optimizer.step import BucketPipeline, StepTrace
from spark_hvd.transport.host.hierarchy import HostSharing
from spark_hvd.transport.torch_private import at_end_of_backward
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import PendingCollective


class Phase(enum.Enum):
    """When the reducer waits for its buckets."""

    LEARNING = "learning"
    EAGER = "eager"
    LATE = "late"


class Stepped(Protocol):
    """Is notified of a reducer's steps."""

    def stepped(self) -> None:
        """Handle a completed step of the plan."""

    def pause(self) -> None:
        """Discard measurements: the next step is not comparable with the ones before."""


class GradientReducer:
    """Reduces the gradients of one optimizer over its own process group.

    Nobody else uses ``group``, which exchanges small facts on ``device``. With ``pipes``, buckets are reduced in
    memory.

    Raises:
        PlanMismatchError: Ranks have different parameters or settings; raised on every rank.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        groups: Sequence[Sequence[int]],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        reduction: Reduction,
        pipes: HostSharing | None,
        passes: int,
        cap_bytes: int,
        settings: dict[str, Any],
        tracing: Tracing,
    ) -> None:
        self._params: list[torch.nn.Parameter] = []
        self._specs: list[ParamSpec] = []
        self._passes = passes
        self._settings = settings
        self._trace = StepTrace(tracing)

        self.phase = Phase.LEARNING
        self.tuner: Stepped | None = None
        self._progress = GradientCounts()
        self._watch = Watch(self._params, self._progress, weakref.ref(self))
        self._plan = GradientPlan(self._params, self._specs, groups, reduction, pipes, cap_bytes)
        self._buckets = self._plan.buckets
        self._pipeline = BucketPipeline(self._buckets, reduction, group, device, self._trace, self.reset)
        self._backwards = 0
        self._finished = self._warned = False
        self._holds_back = False  # until this backward ends, as the program's hooks may change gradients
        self._pack_again, self._marks = False, Marks()
        self._joined: Presence | None = None
        self._newcomers: list[int] | None = None  # of this step, once they are known
        weakref.finalize(self, remove_all, self._watch.handles)
        self.extend(params, specs)
        activity.add_source(self)

    @property
    def nbytes(self) -> int:
        """Total bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self._buckets)

    @property
    def launched(self) -> int:
        """Buckets launched so far in this step."""
        return self._pipeline.launched

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The parameters' names in each bucket, in plan order; empty before the first step."""
        return tuple(tuple(bucket.names) for bucket in self._buckets)

    @property
    def in_flight(self) -> bool:
        """Whether an all-reduce is in flight that nobody has waited for."""
        return self._pipeline.in_flight

    @property
    def started(self) -> bool:
        """Whether gradients were produced after the last step that are not reduced yet."""
        return self._backwards > 0 and not self._finished

    @property
    def in_backward(self) -> bool:
        """Whether a backward has produced gradients and has not ended; if none is running, it was interrupted."""
        return not self._progress.idle

    def pending(self, now: float) -> list[PendingCollective]:
        """Return the buckets that were launched and have not been waited for; from any thread."""
        return self._pipeline.pending(now)

    def extend(self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec]) -> None:
        """Add the parameters that are new; collective; call it between steps. A removed group leaves its own behind."""
        if self.started:
            raise ValueError("add_param_group between backward() and step(): call it after step() instead")
        known = set(map(id, self._params))
        specs = [spec for param, spec in zip(params, specs, strict=True) if id(param) not in known]
        params = [param for param in params if id(param) not in known]
        require_same(specs, self._settings, self._pipeline.exchange)
        first = len(self._params)
        self._params.extend(params)
        self._specs.extend(specs)
        self._progress.left.extend([self._passes] * len(params))
        self._progress.buckets.extend([NoBucket()] * len(params))
        self._plan.unplanned.extend(range(first, len(self._params)))
        self._watch.add(index for index in range(first, len(self._params)) if self._params[index].requires_grad)

    def restart(
        self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec], groups: Sequence[Sequence[int]]
    ) -> None:
        """Reduce these parameters instead, as if made with them; collective; call it before the first backward."""
        self._watch.clear()
        progress, unplanned = self._progress, self._plan.unplanned
        for each in (self._params, self._specs, progress.left, progress.buckets, unplanned):
            each.clear()
        self._plan.groups = groups
        self.extend(params, specs)

    def close(self) -> None:
        """Release the parameters: nothing will be reduced any more."""
        self._watch.clear()
        while self._buckets:
            self._buckets.pop().release()

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step; the count restarts."""
        self._passes = passes
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        if self._watch.is_lost:
            self._watch.renew()
        progress = self._progress
        progress.idle = True
        progress.left[:] = [self._passes] * len(progress.left)
        progress.order.clear()
        self._pipeline.reset()
        self._backwards = 0
        self._finished = False
        self._marks.clear()
        self._newcomers = None

    def stepped(self) -> None:
        """Record that the optimizer has made its step."""
        activity.optimizer_steps += 1
        if activity.at_step is not None and activity.progress is None:
            activity.at_step()
        self._trace.stepped()
        self.reset()
        if self.tuner is not None and self.phase is Phase.EAGER:
            if self._pipeline.participation.joined:
                self.tuner.pause()
            else:
                self.tuner.stepped()

    def shadow(self, *, counts: bool) -> bool:
        """Shadow the next step of the other ranks, without gradients; those that lie in buckets are dropped.

        ``counts`` says whether Average counts this rank.

        Returns:
            Whether any rank has made a step; if not, all have joined.

        Raises:
            CollectiveError: A peer or the network failed.
        """
        self.reset()
        self._joined = Presence.JOINED if counts else Presence.GONE
        try:
            for bucket in self._buckets:
                bucket.drop()
            self.synchronize()
        finally:
            self._joined = None
            self.reset()
        if self.tuner is not None:
            self.tuner.pause()
        return self._pipeline.participation.anyone

    def hooks(self) -> list[Callable[[torch.Tensor], None]]:
        """Return the functions to call when a gradient is ready, by parameter index, if autograd uses other tensors."""
        return [make_hook(index, self._progress, weakref.ref(self)) for index in range(len(self._params))]

    # ---- moments of a backward ------------------------------------------------------------------------------------

    def begin_backward(self, index: int) -> None:
        """Record the first gradient of a backward pass, which is parameter `index`'s."""
        if self._finished:
            if not self._plan.is_cleared(index):
                self.overrun(index)
            self.reset()  # the last step was skipped (GradScaler does that on inf), and gradients were zeroed
        elif self._backwards >= self._passes and not self.in_flight and self._marks.are_cleared(self._params, index):
            self.reset()  # likewise, before they were reduced
        self._progress.idle = False
        self._holds_back = self._watch.are_followed
        self._trace.backward_began()
        at_end_of_backward(self._end_backward)

    def advance(self) -> None:
        """Launch complete buckets, in plan order."""
        pipeline, buckets = self._pipeline, self._buckets
        while not self._holds_back and pipeline.launched < len(buckets) and buckets[pipeline.launched].pending == 0:
            pipeline.launch_next(self._presence())

    def overrun(self, index: int) -> NoReturn:
        """Raise the AssertionError of a parameter whose gradient comes too late."""
        overrun(self._specs[index].name, self._passes, missing=self._progress.left[index] > 0)

    def _end_backward(self) -> None:
        if self._progress.idle:
            return  # it was inside another backward, which has made the step
        self._progress.idle = True
        self._trace.backward_ended()
        self._backwards += 1
        if self._backwards == self._passes:
            if self.phase is Phase.LEARNING:
                self._settle(last_chance=False)
            if self.phase is Phase.EAGER:
                self._finish()
        if self.phase is Phase.LATE and not self._finished:
            self._marks.set(self._params)

    # ---- reducing -------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Launch the remaining buckets, with zeros for parameters without a gradient here, and wait for all of them.

        Raises:
            CollectiveError: A peer or the network failed.
            ValueError: gradients were changed after backward and before they were reduced.
        """
        if self._finished:
            return
        if self.phase is Phase.LEARNING:
            self._settle(last_chance=False)
        # A rank raises this before it waits for others, which may not come.
        self._marks.check(self._params, self._specs)
        if self._backwards == 0:
            self._watch.require_hooks()
        if self.phase is Phase.LATE and not self._plan.made:
            self._settle(last_chance=True)
        if self._plan.made:
            self._finish()

    def _settle(self, *, last_chance: bool) -> None:
        """Tell all ranks what this one has seen. Plan once every rank has seen everything, or no more can come."""
        trained = [index for index in self._plan.unplanned if index in self._watch.watched]
        seen, unseen = self._progress.order, set(trained).difference(self._progress.order)
        facts = self._pipeline.gather_facts(
            {
                "order": seen + [index for index in reversed(trained) if index in unseen],
                "complete": len(seen) == len(trained),
                "sparse": self._plan.sparse_here(trained),
                "any": any(self._params[index].grad is not None for index in trained),
                "changed": self._plan.changed_here(trained),
                "weights": fingerprints(self._params),
            },
            self._joined or Presence.HERE,
        )
        if facts and facts[0]["rank"] == dist.get_rank() and not self._warned:
            self._warned = True
            warn_about_start(self._params, self._specs, [fact["weights"] for fact in facts])
        complete = all(fact["complete"] for fact in facts)
        if not complete and not last_chance:
            self.phase = Phase.LATE
        elif not any(fact["any"] for fact in facts):
            self.phase = Phase.LEARNING  # a step without a backward teaches nothing
        else:
            if not last_chance:  # or else a step takes several calls of backward()
                self.phase = Phase.EAGER
            self._place(facts[0]["order"], facts)

    def _place(self, order: Sequence[int], facts: Sequence[dict[str, Any]]) -> None:
        self._plan.take_changes([fact["changed"] for fact in facts], [fact["rank"] for fact in facts])
        self._use(
            self._plan.place(order, [index for fact in facts for index in fact["sparse"]], self._pipeline.exchange)
        )

    def _use(self, buckets: Sequence[FlatBucket]) -> None:
        for bucket in buckets:
            for index in bucket.members:
                self._progress.buckets[index] = bucket

    def replan(self, cap_bytes: int, group: dist.ProcessGroup, *, in_memory: bool) -> None:
        """Use other buckets from the next step on; call it between steps, with the same arguments on every rank.

        Args:
            cap_bytes: upper bound of a bucket.
            group: the process group to use; `in_memory` also needs the one that the reducer was made with.
            in_memory: whether to reduce in shared memory, if the reducer was made for that.
        """
        self._pipeline.group = group
        self._plan.resize(cap_bytes, in_memory=in_memory)
        self._use(self._plan.pack_again(self._pipeline.exchange))
        self.reset()

    def _finish(self) -> None:
        started_ns = time.monotonic_ns()
        activity.wait_begins(started_ns * 1e-9)
        try:
            self._finish_waiting()
        finally:
            activity.wait_ends(time.monotonic())
        self._trace.waited(self._buckets, started_ns)
        if self._pack_again:
            self._use(self._plan.pack_again(self._pipeline.exchange))
            for bucket in self._buckets:
                bucket.adopt()
        self._finished, self._pack_again = True, False
        self._marks.clear()

    def _presence(self) -> Presence:
        """Return how this rank takes part in this step."""
        if self._joined is not None:
            return self._joined
        if self._newcomers is None:
            self._newcomers = self._plan.newcomers()
        return Presence.HERE_WITH_NEWCOMERS if self._newcomers else Presence.HERE

    def _finish_waiting(self) -> None:
        pipeline, presence = self._pipeline, self._presence()
        pipeline.must_look = self.tuner is not None
        pipeline.launch_rest(presence)
        pipeline.finish(0, [self._params[index] for index in self._plan.sparse], presence)
        if pipeline.participation.newcomers:
            self._place_newcomers(presence)

    def _place_newcomers(self, presence: Presence) -> None:
        """Place parameters that were added, unfrozen or changed after the last plan; their gradients are complete."""
        newcomers, plan = self._newcomers or [], self._plan
        misfits = [index for bucket in self._buckets for index in bucket.misfits]
        facts = self._pipeline.gather_facts(
            {
                "newcomers": newcomers,
                "misfits": misfits,
                "changed": plan.changed_here(),
                "sparse": plan.sparse_here(newcomers + misfits),
            },
            presence,
        )
        plan.require_same_newcomers([fact["newcomers"] for fact in facts], [fact["rank"] for fact in facts])
        misfits = sorted({index for fact in facts for index in fact["misfits"]})
        plan.withdraw(misfits)
        buckets, sparse = len(self._buckets), len(plan.sparse)
        self._place(facts[0]["newcomers"][::-1] + misfits, facts)
        self._watch.add(newcomers)
        self._pipeline.launch_rest(presence := self._joined or Presence.HERE)
        self._pipeline.finish(buckets, [self._params[index] for index in plan.sparse[sparse:]], presence)
        plan.require_fit(buckets)
        self._pack_again = bool(misfits)
