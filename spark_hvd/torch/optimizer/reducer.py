"""The gradient reducer: it sums gradients bucket by bucket while backward goes on, with no negotiation per step.

A step goes through these moments. Hooks count gradients as autograd produces them; when a bucket has all of its own it
is launched, strictly in plan order, so that all ranks issue the same all-reduces in the same order. At the end of
backward the reducer waits for them ("eager"), so clipping and loss scaling need no extra call. If some rank's first
backward left parameters without a gradient, waiting there could block one rank on another that has a second backward
or a collective of its own to do first; the reducer then waits in `synchronize` only ("late").

The first step is for learning: nothing is launched before one rank's order of readiness and the parameters with sparse
gradients are known to all ranks, in one exchange.

A rank that has called join() stands in: it takes part in the same collectives, with nothing of its own.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spark_hvd.collectives.tracing import Tracing
from spark_hvd.torch.optimizer.arguments import fingerprints, warn_of_start
from spark_hvd.torch.optimizer.buckets import ParamSpec
from spark_hvd.torch.optimizer.flat import FlatBucket, Reduction
from spark_hvd.torch.optimizer.hooks import GradientCounts, Unplanned, make_hook, remove_all
from spark_hvd.torch.optimizer.participation import Presence
from spark_hvd.torch.optimizer.plan import GradientPlan, require_same
from spark_hvd.torch.optimizer.step import BucketPipeline
from spark_hvd.torch.optimizer.trace import Stepped, StepTrace
from spark_hvd.transport.host.hierarchy import HostSharing
from spark_hvd.transport.torch_private import at_end_of_backward, changes
from spark_hvd.world.activity import activity
from spark_hvd.world.vitals import Underway


class Phase(enum.Enum):
    """When the reducer waits for its buckets."""

    LEARNING = "learning"
    EAGER = "eager"
    LATE = "late"


class GradientReducer:
    """Reduces the gradients of one optimizer over one process group of its own.

    Args:
        params: the optimizer's parameters.
        specs: what they are, in the same order.
        groups: indices of parameters to keep in one bucket.
        group: a process group that nobody else uses.
        device: a device that `group` can exchange small facts on.
        reduction: how gradients are scaled and compressed.
        pipes: between the ranks of one host, or the levels of several: buckets on the CPU are reduced in memory.
        passes: backward passes a step.
        cap_bytes: upper bound of a bucket.
        settings: what else must be equal on all ranks.
        tracing: the process' timeline.

    Raises:
        PlanMismatchError: ranks have different parameters or settings; raised on every rank.
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
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watched: set[int] = set()
        self._plan = GradientPlan(self._params, self._specs, groups, reduction, pipes, cap_bytes)
        self._buckets = self._plan.buckets
        self._pipeline = BucketPipeline(self._buckets, reduction, group, device, self._trace, self.reset)
        self._backwards = 0
        self._finished = False
        self._warned = False
        self._marks: list[tuple[int, torch.Tensor, int]] = []
        self._joined: Presence | None = None
        self._newcomers: list[int] | None = None  # of this step, once it is known
        weakref.finalize(self, remove_all, self._handles)
        self.extend(params, specs)
        activity.add_source(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self._buckets)

    @property
    def launched(self) -> int:
        """Buckets launched so far in this step."""
        return self._pipeline.launched

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The names in each bucket, in plan order; empty before the first step."""
        return tuple(tuple(bucket.names) for bucket in self._buckets)

    @property
    def in_flight(self) -> bool:
        """Whether an all-reduce was launched that nobody has waited for."""
        return self._pipeline.in_flight

    @property
    def started(self) -> bool:
        """Whether gradients were produced since the last step that are not reduced yet."""
        return self._backwards > 0 and not self._finished

    def underway(self, now: float) -> list[Underway]:
        """Buckets that were launched and have not been waited for; from any thread."""
        return self._pipeline.underway(now)

    def extend(self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec]) -> None:
        """Take in more parameters; collective, to be called between steps."""
        if self.started:
            raise ValueError("add_param_group between backward() and step(): call it after step() instead")
        require_same(specs, self._settings, self._pipeline.exchange)
        first = len(self._params)
        self._params.extend(params)
        self._specs.extend(specs)
        self._progress.left.extend([self._passes] * len(params))
        self._progress.units.extend([Unplanned()] * len(params))
        self._plan.unplanned.extend(range(first, len(self._params)))
        for index in range(first, len(self._params)):
            if self._params[index].requires_grad:
                self._watch(index)

    def restart(
        self, params: Sequence[torch.nn.Parameter], specs: Sequence[ParamSpec], groups: Sequence[Sequence[int]]
    ) -> None:
        """Reduce these instead, as if made with them; collective, to be called before the first backward."""
        remove_all(self._handles)
        progress, unplanned = self._progress, self._plan.unplanned
        for each in (self._params, self._specs, progress.left, progress.units, unplanned, self._watched):
            each.clear()
        self._plan.groups = groups
        self.extend(params, specs)

    def _watch(self, index: int) -> None:
        if index in self._watched:
            return
        self._watched.add(index)
        hook = make_hook(index, self._progress, weakref.ref(self))
        self._handles.append(self._params[index].register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Let go of the parameters, because nothing will be reduced any more."""
        remove_all(self._handles)
        while self._buckets:
            self._buckets.pop().release()

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes a step; counts from zero again."""
        self._passes = passes
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        progress = self._progress
        progress.idle = True
        progress.left[:] = [self._passes] * len(progress.left)
        progress.order.clear()
        self._plan.drop_empty()
        self._pipeline.reset()
        self._backwards = 0
        self._finished = False
        self._marks.clear()
        self._newcomers = None

    def stepped(self) -> None:
        """The optimizer has made its step."""
        activity.optimizer_steps += 1
        self._trace.stepped()
        self.reset()
        if self.tuner is not None and self.phase is Phase.EAGER:
            if self._pipeline.participation.joined:
                self.tuner.pause()
            else:
                self.tuner.stepped()

    def stand_in(self, *, counts: bool) -> bool:
        """Take part in the next step of the other ranks, without gradients; those that lie in buckets here are dropped.

        Args:
            counts: Whether Average divides by this rank.

        Returns:
            Whether any rank has made a step; else all have joined.

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

    # ---- moments of a backward ------------------------------------------------------------------------------------

    def begin_backward(self, index: int) -> None:
        """The first gradient of a backward pass has come, that of parameter `index`."""
        if self._finished:
            if any(bucket.holds_gradients(index) for bucket in self._buckets):
                self.overrun(index)
            # The last step was not taken (GradScaler skips one on inf), and its gradients were dropped or zeroed.
            self.reset()
        self._progress.idle = False
        for bucket in self._buckets:
            bucket.part_strays(self._buckets)
        self._trace.backward_began()
        at_end_of_backward(self._end_backward)

    def advance(self) -> None:
        """Launch what is complete, in plan order."""
        pipeline, buckets = self._pipeline, self._buckets
        while pipeline.launched < len(buckets) and buckets[pipeline.launched].pending == 0:
            pipeline.launch_next(self._presence())

    def overrun(self, index: int) -> NoReturn:
        """A parameter has a gradient once more than expected.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            f"parameter {self._specs[index].name!r} got a gradient more than backward_passes_per_step={self._passes} "
            f"times before step(), or after synchronize(). To accumulate gradients over n calls of backward(), pass "
            f"backward_passes_per_step=n; to drop them, call optimizer.zero_grad()"
        )

    def _end_backward(self) -> None:
        self._progress.idle = True
        self._trace.backward_ended()
        self._backwards += 1
        if self._backwards == self._passes:
            if self.phase is Phase.LEARNING:
                self._settle(last_chance=False)
            if self.phase is Phase.EAGER:
                self._finish()
        if self.phase is Phase.LATE and not self._finished:
            graded = [(index, param.grad) for index, param in enumerate(self._params) if param.grad is not None]
            self._marks = [(index, grad, changes(grad)) for index, grad in graded]

    # ---- reducing -------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Launch what is left, with zeros for parameters that got no gradient here, and wait for all of it.

        Raises:
            CollectiveError: a peer or the network failed.
            ValueError: gradients were changed after backward and before they were reduced.
        """
        if self._finished:
            return
        if self.phase is Phase.LEARNING:
            self._settle(last_chance=False)
        # A rank that raises this does so before it waits for others, who may not come.
        for index, grad, version in self._marks:
            if self._params[index].grad is not grad or changes(grad) != version:
                raise ValueError(
                    f"the gradient of {self._specs[index].name!r} was changed before it was reduced (clipped or "
                    f"unscaled?). Some parameters get no gradient in some backward passes of this model, so reduction "
                    f"ends in step(): call optimizer.synchronize() before you change gradients"
                )
        if self.phase is Phase.LATE and not self._plan.made:
            self._settle(last_chance=True)
        if self._plan.made:
            self._finish()

    def _settle(self, *, last_chance: bool) -> None:
        """Tell all ranks what was seen here; plan if every rank has seen all there is to see, or no more will come."""
        trained = [index for index in self._plan.unplanned if index in self._watched]
        seen = self._progress.order
        facts = self._pipeline.gather_facts(
            {
                "order": seen + [index for index in reversed(trained) if index not in set(seen)],
                "complete": len(seen) == len(trained),
                "sparse": self._plan.sparse_here(trained),
                "any": any(self._params[index].grad is not None for index in trained),
                "weights": fingerprints(self._params),
                "kinds": self._plan.kinds_here(self._plan.recast(trained)),
            },
            self._joined or Presence.HERE,
        )
        self._plan.require_same_kinds([fact["kinds"] for fact in facts])
        if facts and facts[0]["rank"] == dist.get_rank() and not self._warned:
            self._warned = True
            warn_of_start(self._params, self._specs, [fact["weights"] for fact in facts])
        complete = all(fact["complete"] for fact in facts)
        if not complete and not last_chance:
            self.phase = Phase.LATE
        elif not any(fact["any"] for fact in facts):
            self.phase = Phase.LEARNING  # a step without a backward teaches nothing
        else:
            if complete:
                self.phase = Phase.EAGER
            self._place(facts[0]["order"], facts)

    def _place(self, order: Sequence[int], facts: Sequence[dict[str, Any]]) -> None:
        sparse = [index for fact in facts for index in fact["sparse"]]
        self._use(self._plan.place(order, sparse, self._pipeline.exchange))

    def _use(self, buckets: Sequence[FlatBucket]) -> None:
        for bucket in buckets:
            for index in bucket.members:
                self._progress.units[index] = bucket

    def replan(self, cap_bytes: int, group: dist.ProcessGroup, *, in_memory: bool) -> None:
        """Use other buckets from the next step on; to be called between steps, with the same arguments on every rank.

        Args:
            cap_bytes: upper bound of a bucket.
            group: the process group to use; `in_memory` needs the one that the reducer was made with besides.
            in_memory: whether to reduce in shared memory, if the reducer was made for that.
        """
        self._pipeline.group = group
        self._use(self._plan.pack_again(cap_bytes, self._pipeline.exchange, in_memory=in_memory))
        self.reset()

    def _finish(self) -> None:
        started_ns = time.monotonic_ns()
        activity.wait_begins(started_ns * 1e-9)
        try:
            self._finish_waiting()
        finally:
            activity.wait_ends(time.monotonic())
        self._trace.waited(self._buckets, started_ns)
        self._finished = True
        self._marks.clear()

    def _presence(self) -> Presence:
        """How this rank takes part in this step."""
        if self._joined is not None:
            return self._joined
        if self._newcomers is None:
            self._newcomers = self._plan.newcomers() + self._plan.changed()
            self._plan.vacate(self._newcomers)
        return Presence.HERE_WITH_NEWCOMERS if self._newcomers else Presence.HERE

    def _finish_waiting(self) -> None:
        pipeline, presence = self._pipeline, self._presence()
        pipeline.must_look = self.tuner is not None
        pipeline.launch_rest(presence)
        pipeline.finish(0, [self._params[index] for index in self._plan.sparse], presence)
        if pipeline.participation.newcomers:
            self._take_in_newcomers(presence)

    def _take_in_newcomers(self, presence: Presence) -> None:
        """Place what was added, unfrozen or cast since the last plan: its gradients are complete, hooks or not."""
        newcomers = self._newcomers or []
        facts = self._pipeline.gather_facts(
            {
                "newcomers": newcomers,
                "sparse": self._plan.sparse_here(newcomers),
                "kinds": self._plan.kinds_here(newcomers),
            },
            presence,
        )
        indices = [fact["newcomers"] for fact in facts]
        self._plan.require_same_newcomers(indices, [fact["rank"] for fact in facts])
        self._plan.require_same_kinds([fact["kinds"] for fact in facts])
        self._plan.vacate(indices[0])  # a rank that has joined has not looked
        buckets, sparse = len(self._buckets), len(self._plan.sparse)
        self._place(indices[0][::-1], facts)
        for index in newcomers:
            self._watch(index)
        self._pipeline.launch_rest(presence)
        self._pipeline.finish(buckets, [self._params[index] for index in self._plan.sparse[sparse:]], presence)
