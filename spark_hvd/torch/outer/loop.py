"""The outer loop of LocalSGD and DiLoCo: when ranks exchange, what they exchange, and the last common parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import global_process_set, queue_of
from spark_hvd.context.standing import current, in_world
from spark_hvd.torch.optimizer.arguments import fingerprints, spec_of
from spark_hvd.torch.optimizer.plan import require_same
from spark_hvd.torch.outer.compressors import RowCompressor
from spark_hvd.torch.outer.fragment import Fragment, OuterSettings
from spark_hvd.world.errors import MismatchError


class OuterLoop:
    """Counts the local steps of one optimizer, and exchanges their effect with the other ranks.

    Attributes:
        count: Number of exchanges that were applied.
        outer: The outer optimizer. It is passed with parameters of the same shapes, and steps on :attr:`anchors`
            instead. None: the parameters are averaged.
    """

    def __init__(
        self,
        settings: OuterSettings,
        names: Sequence[str],
        fragments: Sequence[Sequence[torch.nn.Parameter]],
        buffers: Sequence[torch.Tensor],
        outer: torch.optim.Optimizer | None,
    ) -> None:
        self._settings = settings
        self._names = list(names)
        self._buffers = buffers
        count = len(fragments)
        # Exchanges are spread over the first round, and so over all later ones; the last begins when the round ends.
        self._fragments = [
            Fragment(
                settings, number, params, buffers if number == count else (), -(-settings.sync_every * number // count)
            )
            for number, params in enumerate(fragments, 1)
        ]
        self.outer = outer
        self._begun = False
        self._checked = False
        self.count = 0

    @property
    def anchors(self) -> list[torch.nn.Parameter]:
        """The parameters after the last exchange, equal on all ranks."""
        return [anchor for fragment in self._fragments for anchor in fragment.anchors]

    @property
    def steps(self) -> int:
        """This rank's local steps since the last exchange of the fragment that was exchanged the longest time ago."""
        return max(fragment.steps for fragment in self._fragments)

    @property
    def _takes_part(self) -> bool:
        process_set = self._settings.process_set
        current()  # raises outside a world
        return process_set is global_process_set or bool(process_set.included())

    # ---- steps --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self) -> None:
        """Prepare for a local step. The first call takes the present weights as the start of training.

        Raises:
            NotInitializedError: Outside a world.
            PlanMismatchError: First call in a world: parameters or settings differ; raised on every rank.
            MismatchError: First call in a world: ranks start from different weights; raised on every rank.
            CollectiveError: A peer or the network failed.
        """
        if self._begun and self._checked:
            return
        if not self._begun:
            self._take_weights()
        if not self._checked and self._takes_part:
            self._check()
        self._checked = True

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a local step, and start or end an exchange when it is due.

        Raises:
            NotInitializedError: Outside a world.
            MismatchError, StalledError, CollectiveError: See NamedHandle.wait.
        """
        if not self._takes_part:
            return
        for fragment in self._fragments:
            fragment.steps += 1
            if fragment.exchange is None and fragment.steps >= fragment.wait:
                fragment.begin()
            if fragment.exchange is not None and fragment.steps - fragment.exchange.steps >= self._settings.overlap:
                self._end(fragment)

    @torch.no_grad()
    def synchronize(self) -> None:
        """See OuterOptimizer.synchronize."""
        if not self._takes_part:
            return
        self.before_step()
        for fragment in self._fragments:
            if fragment.exchange is not None:
                self._end(fragment)
        process_set = self._settings.process_set
        name = f"{self._settings.name}.synchronize"
        mine = self.count, [fragment.steps for fragment in self._fragments]
        facts = allgather_object(mine, name=name, process_set=process_set)
        last = max(count for count, _ in facts)
        leaders = [place for place, (count, _) in enumerate(facts) if count == last]
        if len(leaders) < len(facts):
            self._catch_up(queue_of(process_set).ranks[leaders[0]], last)
        scale = len(facts) / len(leaders) if mine[0] == last else 0.0
        stepped = [
            fragment
            for number, fragment in enumerate(self._fragments)
            if any(facts[place][1][number] for place in leaders)
        ]
        for fragment in stepped:
            fragment.begin(scale)
        for fragment in stepped:
            self._end(fragment)
        for fragment in self._fragments:
            fragment.wait = fragment.first_wait

    def _take_weights(self) -> None:
        for fragment in self._fragments:
            for anchor, param in zip(fragment.anchors, fragment.params, strict=True):
                anchor.copy_(param)
        self._begun = True

    def _check(self) -> None:
        settings = self._settings

        def everywhere(fact: Any) -> list[Any]:
            return allgather_object(fact, name=f"{settings.name}.check", process_set=settings.process_set)

        params = [param for fragment in self._fragments for param in fragment.params]
        specs = [spec_of(*each) for each in zip(self._names, params, strict=True)]
        chosen = {
            "kind": settings.kind,
            "sync_every": settings.sync_every,
            "overlap": settings.overlap,
            "alpha": settings.alpha,
            "fragments": [len(fragment.params) for fragment in self._fragments],
            "compression": _name_of(settings.compression),
            "buffers": [list(buffer.shape) for buffer in self._buffers],
        }
        require_same(specs, chosen, everywhere, settings.kind)
        weights = everywhere(fingerprints(self.anchors))
        different = [name for name, *numbers in zip(self._names, *weights, strict=True) if len(set(numbers)) > 1]
        if different:
            raise MismatchError(
                f"{settings.kind}: ranks start from different weights: {len(different)} of {len(self._names)} "
                f"parameters differ, such as {different[0]!r}; expected the same on every rank. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step."
            )

    def _end(self, fragment: Fragment) -> None:
        fragment.end(self.outer)
        self.count += 1

    def _catch_up(self, root_rank: int, count: int) -> None:
        """Copy the state of a rank that has not joined: some joined before the others' last exchange."""
        process_set, name = self._settings.process_set, f"{self._settings.name}.leader"
        for fragment in self._fragments:
            fragment.take_over(root_rank)
        mine = {} if self.outer is None else self.outer.state_dict()
        state = broadcast_object(mine, root_rank, name=name, process_set=process_set)
        if self.count == count:
            return
        if self.outer is not None:
            self.outer.load_state_dict(state)
        for fragment in self._fragments:
            fragment.restart()
        self.count = count

    # ---- state --------------------------------------------------------------------------------------------------

    def leave_world(self) -> None:
        """Prepare for another world: drop exchanges in flight, and compare the ranks again."""
        for fragment in self._fragments:
            fragment.exchange = None  # the next one includes its steps
        self._checked = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from. It excludes exchanges in flight, whose steps are sent again."""
        return {
            "anchors": [flat for fragment in self._fragments for flat in fragment.flats],
            "lost": [lost for fragment in self._fragments for lost in fragment.lost],
            "optimizer": None if self.outer is None else self.outer.state_dict(),
            "steps": [fragment.steps for fragment in self._fragments],
            "waits": [fragment.wait for fragment in self._fragments],
            "rounds": self.count,
            "begun": self._begun,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`.

        Raises:
            ValueError: The state belongs to other parameters or fragments, or to the other kind.
        """
        own = self.state_dict()
        mine, theirs = ([list(flat.shape) for flat in each["anchors"]] for each in (own, state))
        if mine != theirs or (state["optimizer"] is None) is not (self.outer is None):
            raise ValueError(
                f"the state is of {'LocalSGD' if state['optimizer'] is None else 'DiLoCo'} with {theirs} parameters, "
                f"this is {self._settings.kind} with {mine}: load it into an optimizer of the same kind, parameters "
                "and fragments."
            )
        for fragment in self._fragments:
            if fragment.exchange is not None and in_world():
                fragment.exchange.wait()
            fragment.exchange = None
        for key in ("anchors", "lost"):
            for flat, theirs_flat in zip(own[key], state[key], strict=True):
                flat.copy_(theirs_flat)
        if self.outer is not None:
            self.outer.load_state_dict(state["optimizer"])
        for fragment, steps, wait in zip(self._fragments, state["steps"], state["waits"], strict=True):
            fragment.steps, fragment.wait = steps, wait
        self.count, self._begun = state["rounds"], state["begun"]


def _name_of(compression: Any) -> str:
    if isinstance(compression, RowCompressor):
        return repr(compression)
    return compression.__name__ if isinstance(compression, type) else type(compression).__name__
