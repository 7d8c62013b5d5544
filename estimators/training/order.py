"""The order of an epoch's rows, and whether an interrupted epoch can continue in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_hvd.data.readers.sharding import Position
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.store.errors import CheckpointError

PARTIAL_EPOCH = "begun"
"""Key in checkpoints; its value is old, so that old checkpoints can be read."""


def order_of(spec: TrainSpec, rows: int, layout: int) -> dict[str, Any]:
    """Return what the order of this number of rows in an epoch depends on; see :class:`Rows`."""
    return {
        "random_seed": spec.seed,
        "batch_size": spec.batch_size,
        "shuffle": spec.shuffle,
        "shuffle_buffer_size": spec.reader.get("window_rows"),
        "drop_last": spec.drop_last,
        "inmemory_cache_all": bool(spec.reader.get("cache")),
        "the rows": rows,
        "the row groups": layout,
        "the way of shuffling": 3,
    }


def check_order(state: Mapping[str, Any], order: Mapping[str, Any], run_id: str) -> None:
    """Check that an interrupted epoch can continue with its remaining rows.

    Raises:
        CheckpointError: their order has changed.
    """
    differ = [name for name, value in order.items() if state["order"].get(name) != value]
    if state[PARTIAL_EPOCH] is not None and differ:
        name = differ[0]
        numbers = "" if name.startswith("the ") else f", {name}={state['order'][name]!r} then and {order[name]!r} now"
        raise CheckpointError(
            f"run_id={run_id!r} was interrupted within epoch {len(state['history']) + 1}, but its rows would now come "
            f"in another order: {name} changed{numbers}. Fit the same data with the former parameters (including "
            "num_proc, which determines the row groups; min_num_proc allows fewer ranks), or pass another run_id"
        )


def position_of(order: Mapping[str, Any], resumed: dict[str, Any] | None) -> Position:
    """Return where to continue: at the checkpoint's position, or with the next pass if the order has changed."""
    if resumed is None:
        return Position()
    position = Position.from_json(resumed["position"])
    if not position.done or resumed["order"] == order:
        return position
    return Position(position.epoch + 1)
