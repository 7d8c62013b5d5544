"""The outer loop of LocalSGD and DiLoCo: when ranks exchange, what they exchange, and the last common parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import global_process_set, queue_of
from spark_hvd.context.global_state import current, in_world
from spark_hvd.torch.optimizer.arguments import fingerprints, spec_of
from spark_hvd.torch.optimizer.plan import require_same
from spark_hvd.torch.outer.compressors import RowCompressor
from spark_hvd.torch.outer.fragment import FlatTensors, Fragment, OuterSettings
from spark_hvd.world.errors import MismatchError

T = TypeVar("T")


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
        params: Sequence[torch.nn.Parameter],
        fragments: Sequence[Sequence[int]],
        buffers: Callable[[], Sequence[torch.Tensor]],
        outer: torch.optim.Optimizer | None,
    ) -> None:
        """`fragments` has the places of each one's parameters in `params`, which are in the inner optimizer's order."""
        self._settings = settings
        self._names, self._params, self._divided = list(names), list(params), [list(group) for group in fragments]
        self._buffers = buffers
        count = len(fragments)
        # Exchanges are spread over the first round, and so over all later ones; the last begins when the round ends.
        self._fragments = [
            Fragment(
                settings,
                number,
                [params[place] for place in group],
                buffers if number == count else list,
                -(-settings.sync_every * number // count),
            )
            for number, group in enumerate(fragments, 1)
        ]
        self.outer = outer
        self._begun = False
        self._checked = False
        self.count = 0

    @property
    def anchors(self) -> list[torch.nn.Parameter]:
        """The parameters after the last exchange, equal on all ranks; in the inner optimizer's order."""
        return self._ordered([fragment.anchors for fragment in self._fragments], self._divided)

    @property
    def steps(self) -> int:
        """This rank's local steps since the last exchange of the least recently exchanged fragment."""
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
        mine = self.count, [fragment.owes for fragment in self._fragments]
        facts = allgather_object(mine, name=name, process_set=process_set)
        last = max(count for count, _ in facts)
        leaders = [place for place, (count, _) in enumerate(facts) if count == last]
        if len(leaders) < len(facts):
            self._catch_up(queue_of(process_set).ranks[leaders[0]], last)
        scale = len(facts) / len(leaders) if mine[0] == last else 0.0
        owed = [
            fragment
            for number, fragment in enumerate(self._fragments)
            if any(facts[place][1][number] for place in leaders)
        ]
        for fragment in owed:
            fragment.begin(scale, whole=True)
        for fragment in owed:
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

        specs = [spec_of(*each) for each in zip(self._names, self._params, strict=True)]
        chosen = {
            "kind": settings.kind,
            "sync_every": settings.sync_every,
            "overlap": settings.overlap,
            "alpha": settings.alpha,
            "fragments": self._divided,
            "compression": _name_of(settings.compression),
            "buffers": [list(buffer.shape) for buffer in self._buffers()],
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
            fragment.take_over(root_rank, behind=self.count < count)
        mine = {} if self.outer is None else self.outer.state_dict()
        state = broadcast_object(mine, root_rank, name=name, process_set=process_set)
        if self.count == count:
            return
        if self.outer is not None:
            self.outer.load_state_dict(state)
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
            # The next exchange uses their memory for something else.
            "lost": [lost.clone() for fragment in self._fragments for lost in fragment.lost],
            "optimizer": None if self.outer is None else self.outer.state_dict(),
            "fragments": self._divided,
            "steps": [fragment.steps for fragment in self._fragments],
            "waits": [fragment.wait for fragment in self._fragments],
            "rounds": self.count,
            "begun": self._begun,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError if :meth:`load_state_dict` cannot load a state."""
        missing = {"anchors", "lost", "optimizer", "steps", "rounds", "begun"} - state.keys()
        if missing:
            raise ValueError(
                f"the state of the exchanges lacks {', '.join(map(repr, sorted(missing)))}: load a complete result of "
                "state_dict()"
            )
        divided, steps, _ = self._schedule(state)
        fits = sorted(place for group in divided for place in group) == list(range(len(self._params)))
        mine = [[size for layout in self._layouts(divided) for size in layout.sizes]] * 2 if fits else None
        theirs = [[flat.numel() for flat in state[key]] for key in ("anchors", "lost")]
        if mine != theirs or len(steps) != len(divided) or (state["optimizer"] is None) is not (self.outer is None):
            raise ValueError(
                f"the state is of {'LocalSGD' if state['optimizer'] is None else 'DiLoCo'} with "
                f"{sum(theirs[0])} numbers in {len(steps)} fragments, this is {self._settings.kind} with "
                f"{sum(param.numel() for param in self._params)}: load it into an optimizer of the same kind for the "
                "same parameters."
            )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict` that :meth:`check_state` accepts, whatever its fragments are."""
        for fragment in self._fragments:
            if fragment.exchange is not None and in_world():
                fragment.exchange.wait()
            fragment.exchange = None
        if self.outer is not None:
            self.outer.load_state_dict(state["optimizer"])
        divided, steps, waits = self._schedule(state)
        for key, own in (("anchors", "flats"), ("lost", "lost")):
            mine = self._views([flat for fragment in self._fragments for flat in getattr(fragment, own)], self._divided)
            for view, their_view in zip(mine, self._views(state[key], divided), strict=True):
                view.copy_(their_view)
        if divided != self._divided:  # all parameters then have as many steps as those with the most
            waits = [max(steps) + fragment.first_wait for fragment in self._fragments]
            steps = [max(steps)] * len(waits)
        for fragment, its_steps, its_wait in zip(self._fragments, steps, waits, strict=True):
            fragment.steps, fragment.wait = its_steps, its_wait
        self.count, self._begun = state["rounds"], state["begun"]

    def _schedule(self, state: dict[str, Any]) -> tuple[list[list[int]], list[int], list[int]]:
        """Return a state's fragments, and the steps and wait of each. Older states do not name their only one."""
        every, whole = self._settings.sync_every, [list(range(len(self._params)))]
        steps = [state["steps"]] if isinstance(state["steps"], int) else state["steps"]
        return state.get("fragments", whole), steps, state.get("waits", [every])

    def _layouts(self, divided: list[list[int]]) -> list[FlatTensors]:
        return [FlatTensors([self._params[place] for place in group]) for group in divided]

    def _views(self, flats: Sequence[torch.Tensor], divided: list[list[int]]) -> list[torch.Tensor]:
        """Return the parts of the flat tensors of all fragments, in the inner optimizer's order."""
        rest, views = list(flats), []
        for layout in self._layouts(divided):
            own, rest = rest[: len(layout.sizes)], rest[len(layout.sizes) :]
            views.append(layout.views(own))
        return self._ordered(views, divided)

    @staticmethod
    def _ordered(parts: Sequence[Sequence[T]], divided: list[list[int]]) -> list[T]:
        """Bring what each fragment has of its parameters into the inner optimizer's order."""
        places = [place for group in divided for place in group]
        placed = dict(zip(places, chain.from_iterable(parts), strict=True))
        return [placed[place] for place in sorted(placed)]


def _name_of(compression: Any) -> str:
    if isinstance(compression, RowCompressor):
        return repr(compression)
    return compression.__name__ if isinstance(compression, type) else type(compression).__name__
