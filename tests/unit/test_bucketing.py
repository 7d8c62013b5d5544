"""The order and the owners of rows: for all world sizes, and whatever order rows arrive in."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from spark_hvd.data.bucketing import (
    BUCKETS,
    STRIDE,
    buckets_of,
    keys_of,
    mixing,
    order_in_buckets,
    order_of,
    owned_by,
    windows_of,
)

SEEDS = st.tuples(st.integers(0, 1 << 32), st.integers(0, 1000))


@given(st.integers(1, 5000))
def test_every_bucket_has_one_owner_and_owners_have_as_many(parts: int) -> None:
    owned = [buckets_of(part, parts) for part in range(parts)]
    assert [bucket for buckets in owned for bucket in buckets] == list(range(BUCKETS))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    assert [part for part, buckets in enumerate(owned) for _ in buckets] == [
        u * parts // BUCKETS for u in range(BUCKETS)
    ]


@given(st.integers(1, 64), st.integers(0, 20000), st.integers(0, BUCKETS - 1))
def test_consecutive_rows_are_spread_evenly_also_when_they_are_few(parts: int, rows: int, first: int) -> None:
    owners = (first + np.arange(rows) * STRIDE) % BUCKETS * parts // BUCKETS
    counts = np.bincount(owners, minlength=parts)
    assert counts.max() - counts.min() <= 12 + rows // BUCKETS


@given(st.integers(1, 70), st.lists(st.integers(0, 60), min_size=1, max_size=50), st.integers(0, 5000))
def test_owners_differ_by_a_row_whatever_buckets_hold(parts: int, counts: list[int], large: int) -> None:
    buckets = np.array([*counts, large], np.int64)
    owned = [owned_by(part, parts, buckets) for part in range(parts)]
    shares = [int(each.lengths.sum()) for each in owned]
    assert max(shares) - min(shares) <= 1
    taken = [
        (bucket, row)
        for each in owned
        for bucket, first, rows in zip(*each, strict=True)
        for row in range(first, first + rows)
    ]
    assert taken == [(bucket, row) for bucket, rows in enumerate(buckets) for row in range(rows)]


@given(SEEDS)
def test_an_epoch_goes_through_every_bucket_once(seed: tuple[int, int]) -> None:
    assert sorted(order_of(seed)) == list(range(BUCKETS))
    assert (order_of(seed) == order_of(seed)).all()
    assert (order_of(seed) != order_of((seed[0], seed[1] + 1))).any()


@given(st.lists(st.integers(0, (1 << 63) - 1), unique=True, max_size=500), SEEDS)
def test_rows_of_a_bucket_are_ordered_by_keys_that_are_all_different(ids: list[int], seed: tuple[int, int]) -> None:
    keys = keys_of(np.array(ids, np.int64), seed)
    assert len(set(keys.tolist())) == len(ids)
    one_by_one = [int(keys_of(np.array([each], np.int64), seed)[0]) for each in ids]
    assert keys.tolist() == one_by_one


def test_a_shuffled_order_is_not_that_of_ids_nor_that_of_another_epoch() -> None:
    ids = np.arange(1000)
    orders = [np.argsort(keys_of(ids, seed)).tolist() for seed in (None, (0, 0), (0, 1), (1, 0))]
    assert orders[0] == ids.tolist()
    assert len(set(map(tuple, orders))) == 4
    assert abs(np.corrcoef(ids, orders[1])[0, 1]) < 0.15


IDS = st.lists(st.integers(0, 1 << 40) | st.integers(0, (1 << 63) - 1) | st.integers(0, 99), unique=True, max_size=200)


@example([(1 << 62) + 2, 1 << 62, (1 << 33) - 1], 2, None)  # keys that differ in bits that do not fit
@given(IDS, st.integers(1, 5) | st.integers(1, 1 << 14), st.none() | SEEDS)
def test_rows_stand_by_bucket_and_key_however_long_keys_are(
    ids: list[int], buckets: int, seed: tuple[int, int] | None
) -> None:
    rows, places = np.array(ids, np.int64), (np.array(ids, np.int64) % buckets).astype(np.int16)
    assert order_in_buckets(places, rows, seed).tolist() == np.lexsort((keys_of(rows, seed), places)).tolist()


Pieces = list[tuple[int, int, int, int]]
PIECES = st.lists(
    st.tuples(st.integers(0, BUCKETS - 1), st.integers(0, 9), st.integers(0, 5), st.integers(5, 50)), max_size=40
)


@given(PIECES, st.integers(1, 100))
def test_windows_hold_every_piece_and_no_more_rows_than_asked_for(pieces: Pieces, rows: int) -> None:
    windows = list(windows_of([*pieces, (0, 0, 0, 0)], rows))
    assert [piece for window in windows for piece in window] == pieces
    assert all(len(window) == 1 or sum(length for *_, length in window) <= rows for window in windows)


@given(PIECES, SEEDS)
def test_a_window_mixes_buckets_and_keeps_the_order_in_each(pieces: Pieces, seed: tuple[int, int]) -> None:
    whole = [(bucket, first, 0, length) for bucket, first, _, length in pieces]
    order = mixing(whole, seed, 3).tolist()
    lengths = [length for *_, length in whole]
    assert sorted(order) == list(range(sum(lengths)))
    places = np.argsort(order)
    ends = np.cumsum(lengths)
    assert all((np.diff(places[end - length : end]) > 0).all() for end, length in zip(ends, lengths, strict=True))
    assert mixing(whole, None, 3).tolist() == list(range(sum(lengths)))


@given(PIECES, st.none() | SEEDS)
def test_what_is_done_changes_nothing_in_the_order_of_the_rest(pieces: Pieces, seed: tuple[int, int] | None) -> None:
    places = [(bucket, row) for bucket, (_, _, _, length) in enumerate(pieces) for row in range(length)]
    whole = [places[at] for at in mixing([(bucket, first, 0, length) for bucket, first, _, length in pieces], seed, 3)]
    left = [places[at] for at in mixing(pieces, seed, 3)]
    assert left == [(bucket, row) for bucket, row in whole if row >= pieces[bucket][2]]
