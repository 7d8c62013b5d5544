"""A step's way through a gradient reducer's buckets: launched in plan order, summed, waited for, made gradients.

Sparse gradients are in no bucket: every rank gathers the indices and values of all ranks.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from spark_hvd.context.standing import refuse_fork
from spark_hvd.torch.optimizer.flat import FlatBucket, Reduction
from spark_hvd.torch.optimizer.participation import EVERYONE, Participation, Presence, correction_on_device
from spark_hvd.torch.optimizer.trace import StepTrace
from spark_hvd.transport.exchange import all_gather, exchange
from spark_hvd.transport.handles import is_out_of_memory
from spark_hvd.world.activity import activity
from spark_hvd.world.errors import CollectiveError, PlanMismatchError
from spark_hvd.world.vitals import Underway

AllGather = Callable[[torch.Tensor], list[torch.Tensor]]


class BucketPipeline:
    """See the module's description.

    Args:
        buckets: The plan's; their number may grow.
        reduction: How gradients are scaled and compressed.
        group: The process group.
        device: A device that `group` can exchange small facts on.
        trace: Of the step.
        failed: A method to call when a collective has failed.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        reduction: Reduction,
        group: dist.ProcessGroup,
        device: torch.device,
        trace: StepTrace,
        failed: Callable[[], None],
    ) -> None:
        self._buckets = buckets
        self._reduction = reduction
        self._device = device
        self._trace = trace
        self._failed = weakref.WeakMethod(failed)
        self._collective = _Collective(self)
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.launched = 0
        """Buckets launched so far in this step."""
        self.must_look = False
        """Whether the participation must be known to the host, whatever that takes."""
        self.participation = EVERYONE
        """Who has taken part, as far as the host knows."""
        self._correction: float | torch.Tensor = 1.0
        self._ended = 0
        self._since: list[float] = []  # when each bucket of this step was launched

    @property
    def in_flight(self) -> bool:
        """Whether an all-reduce was launched that nobody has waited for."""
        return any(bucket.in_flight for bucket in self._buckets)

    def underway(self, now: float) -> list[Underway]:
        """Buckets that were launched and have not been waited for; from any thread."""
        return [
            Underway(f"bucket {number} of the gradients", now - since, self.ranks)
            for number, since in enumerate(self._since.copy())
            if number >= self._ended
        ]

    def reset(self) -> None:
        """Begin a new step."""
        for bucket in self._buckets:
            bucket.rearm()
        self.launched = self._ended = 0
        self._since.clear()

    def launch_next(self, presence: Presence) -> None:
        """Fill the next bucket and start its all-reduce."""
        bucket = self._buckets[self.launched]
        started_ns = time.monotonic_ns()
        bucket.fill(presence)
        self._since.append(activity.enter("bucket", str(self.launched), "of the gradients"))
        with self._collective:
            bucket.launch(self.group)
            self._trace.launched(self.launched, bucket, started_ns)
            all(earlier.poll() for earlier in self._buckets[: self.launched])  # in order, up to the first not ready
        self.launched += 1

    def launch_rest(self, presence: Presence) -> None:
        """Launch all buckets that are not launched yet."""
        while self.launched < len(self._buckets):
            self.launch_next(presence)

    def finish(self, first: int, sparse: Sequence[torch.nn.Parameter], presence: Presence) -> None:
        """Wait for launched buckets, reduce sparse gradients, and make all of them the gradients.

        Args:
            first: The first bucket to wait for.
            sparse: Parameters with sparse gradients.
            presence: Mine.
        """
        if first == 0:
            self.participation, self._correction = EVERYONE, 1.0
        if sparse:
            with activity.waiting("sparse gradients"):
                self._take(reduce_sparse(sparse, presence, self._sparse_scale_for, self._all_gather))
        with self._collective:
            for bucket in self._buckets[first:]:
                bucket.advance()
        for number in range(first, len(self._buckets)):
            bucket = self._buckets[number]
            with self._collective:
                bucket.wait()
            self._ended += 1
            bucket.receive()
            if number == 0 and not sparse:
                self._look_round(bucket, presence)
            elif (not bucket.on_gpu or bucket.misfits) and bucket.tells_of_misfits:
                self.participation = replace(self.participation, newcomers=True)
            bucket.complete(self._correction)

    def _look_round(self, first: FlatBucket, presence: Presence) -> None:
        """See who has taken part."""
        # The host would have to wait for a device. With one it looks only where it knows that there is news.
        if not first.on_gpu or self.must_look or presence is not Presence.HERE or first.misfits:
            self._take(Participation.read(first.notes))
        elif self._reduction.average:
            self._correction = correction_on_device(first.notes, self._reduction.size)

    def _take(self, participation: Participation) -> None:
        self.participation = participation
        self._correction = self._correction_for(participation)

    def _correction_for(self, participation: Participation) -> float:
        return participation.correction(self._reduction.size) if self._reduction.average else 1.0

    def _sparse_scale_for(self, participation: Participation) -> float:
        mean = 1.0 / self._reduction.size if self._reduction.average else 1.0
        return mean * self._correction_for(participation)

    # ---- facts ----------------------------------------------------------------------------------------------------

    def exchange(self, fact: Any) -> list[Any]:
        """Give every rank the facts of all ranks, in rank order."""
        with self._collective:
            return exchange(fact, self.group, self._device, "facts about the gradients")

    def gather_facts(self, fact: dict[str, Any], presence: Presence) -> list[dict[str, Any]]:
        """Gather the facts of the ranks that make this step, each with its `rank`."""
        rows = self.exchange([presence, fact])
        self.participation = Participation.of([presence for presence, _ in rows])
        return [
            fact | {"rank": rank}
            for rank, (presence, fact) in zip(self.ranks, rows, strict=True)
            if presence < Presence.JOINED
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        with self._collective:
            return all_gather(mine, self.group)

    def _give_up(self, error: RuntimeError) -> None:
        for bucket in self._buckets:
            bucket.abandon()
        failed = self._failed()
        if failed is not None:
            failed()
        if not is_out_of_memory(error):
            raise CollectiveError(f"reducing gradients failed because a peer or the network did: {error}") from error


class _Collective:
    """Within this context something is sent; a class, as steps of small models are made of such small costs."""

    __slots__ = ("_pipeline",)

    def __init__(self, pipeline: BucketPipeline) -> None:
        self._pipeline = weakref.ref(pipeline)

    def __enter__(self) -> None:
        refuse_fork()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            pipeline = self._pipeline()
            assert pipeline is not None
            pipeline._give_up(error)


def reduce_sparse(
    params: Sequence[torch.nn.Parameter],
    presence: Presence,
    scale_for: Callable[[Participation], float],
    all_gather: AllGather,
) -> Participation:
    """Replace each parameter's sparse gradient by the sum over ranks times `scale`; collective.

    A rank without a gradient, or that has joined, contributes none; a parameter that no rank has a gradient for keeps
    None. The result is coalesced, so all ranks hold the same bits.

    Args:
        params: parameters with sparse gradients (one sparse dimension, as nn.Embedding(sparse=True) makes), the same
            on every rank.
        presence: my own; where I have joined, my gradients stay as they are.
        scale_for: 1 / number of ranks for Average, 1 for Sum.
        all_gather: gives tensors of one shape of all ranks, in rank order.

    Returns:
        All ranks' presence.

    Raises:
        PlanMismatchError: Parameters differ between ranks; raised on every rank.
    """
    device = params[0].device
    joined = presence >= Presence.JOINED
    parts = [None if param.grad is None or joined else _coalesced(param.grad) for param in params]
    # -1 tells "no gradient here" from "a gradient of no rows".
    counts = [-1 if part is None else part.indices().shape[1] for part in parts]
    kind = zlib.crc32(repr([(param.dtype, *param.shape) for param in params]).encode())
    table = torch.stack(all_gather(torch.tensor([*counts, kind, presence], device=device))).tolist()
    if any(row[-2] != kind for row in table):
        raise PlanMismatchError(
            "parameters with sparse gradients differ between ranks in dtype or shape, on this one "
            f"{[(str(param.dtype), *param.shape) for param in params]}. Cast and reshape parameters on every rank alike"
        )
    participation = Participation.of([row[-1] for row in table])
    scale = scale_for(participation)
    for place, (param, part) in enumerate(zip(params, parts, strict=True)):
        rows = [row[place] for row in table]
        if max(rows) >= 0:
            reduced = _gather(param, part, rows, scale, all_gather)
            if not joined:
                param.grad = reduced
    return participation


def _coalesced(grad: torch.Tensor) -> torch.Tensor:
    # A tied weight may add a dense gradient to the sparse one, which makes the sum dense.
    return grad.coalesce() if grad.is_sparse else grad.to_sparse(1)


def _gather(
    param: torch.nn.Parameter,
    part: torch.Tensor | None,
    rows: Sequence[int],
    scale: float,
    all_gather: AllGather,
) -> torch.Tensor:
    longest = max(rows)
    indices = torch.zeros(longest, dtype=torch.int64, device=param.device)
    values = torch.zeros((longest, *param.shape[1:]), dtype=param.dtype, device=param.device)
    if part is not None:
        count = part.indices().shape[1]
        indices[:count] = part.indices()[0]
        values[:count] = part.values()
    all_indices, all_values = (all_gather(part) if longest else [part for _ in rows] for part in (indices, values))
    kept_indices = torch.cat(
        [rank_indices[: max(count, 0)] for rank_indices, count in zip(all_indices, rows, strict=True)]
    )
    kept_values = torch.cat([rank_values[: max(count, 0)] for rank_values, count in zip(all_values, rows, strict=True)])
    gathered = torch.sparse_coo_tensor(
        kept_indices.unsqueeze(0), kept_values * scale, param.shape, check_invariants=False
    )
    return gathered.coalesce()
