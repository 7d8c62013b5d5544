"""Over any number of ranks, changes and rollbacks, an epoch is one permutation, block after block."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_hvd.context import basics
from spark_hvd.torch.sampler import ElasticSampler


class Generation(NamedTuple):
    size: int
    batch: int
    steps: int
    every: int
    """Steps from commit to commit."""
    fails: bool
    """Whether uncommitted steps are lost; otherwise it ends with a commit."""


def sampler_of(patch: pytest.MonkeyPatch, dataset: range, rank: int, size: int, **options: bool) -> ElasticSampler:
    # a world of several ranks cannot exist in one process
    patch.setattr(basics, "rank", lambda: rank)
    patch.setattr(basics, "size", lambda: size)
    return ElasticSampler(dataset, seed=3, **options)


def live(
    patch: pytest.MonkeyPatch, dataset: range, committed: dict[str, int], one: Generation, options: dict[str, bool]
) -> tuple[list[int], dict[str, int]]:
    """Return what the ranks of one generation process and commit, in order, and the state that they leave."""
    samplers = []
    for rank in range(one.size):
        samplers.append(sampler_of(patch, dataset, rank, one.size, **options))
        samplers[-1].load_state_dict(committed)
    assert len({len(sampler) for sampler in samplers}) == 1
    dealt = [list(sampler) for sampler in samplers]
    assert all(len(share) == len(samplers[0]) for share in dealt)
    processed: list[int] = []
    kept: list[int] = []

    def commit() -> None:
        nonlocal committed
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        committed = states[0]
        kept.extend(processed)
        processed.clear()

    for step in range(one.steps):
        batches = [share[step * one.batch : (step + 1) * one.batch] for share in dealt]
        if not batches[0]:
            break
        processed.extend(index for row in zip(*batches, strict=True) for index in row)
        for sampler, batch in zip(samplers, batches, strict=True):
            sampler.record_batch(step, len(batch))
        if (step + 1) % one.every == 0:
            commit()
    if not one.fails:
        commit()
    return kept, committed


generations = st.builds(
    Generation,
    size=st.integers(1, 5),
    batch=st.integers(1, 7),
    steps=st.integers(0, 6),
    every=st.integers(1, 4),
    fails=st.booleans(),
)


@given(
    count=st.integers(0, 80),
    lives=st.lists(generations, max_size=8),
    last=generations,
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_sample_once(
    count: int, lives: list[Generation], last: Generation, shuffle: bool, drop_last: bool
) -> None:
    order = list(range(count))
    if shuffle:
        random.Random(3 + 1).shuffle(order)
    committed = {"epoch": 1, "processed_num": 0}
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for one in [*lives, last._replace(steps=1000, fails=False)]:
            kept, committed = live(patch, range(count), committed, one, {"shuffle": shuffle, "drop_last": drop_last})
            seen += kept
            assert committed["processed_num"] == min(len(seen), count)
    assert seen[:count] == order[: len(seen)]
    if drop_last:
        assert count - last.size < len(seen) <= count
    else:
        most = max(one.size for one in [*lives, last])
        assert count <= len(seen) < count + most
        assert seen[count:] == [order[place % count] for place in range(len(seen) - count)]


def test_blocks_are_the_same_with_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    for size in (1, 2, 3, 4):
        shares = [list(sampler_of(monkeypatch, range(48), rank, size)) for rank in range(size)]
        each = 12 // size
        blocks.append([{*(i for share in shares for i in share[k * each : (k + 1) * each])} for k in range(4)])
    assert all(other == blocks[0] for other in blocks)


def test_more_ranks_than_samples_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, processed in ((5, 4), (1, 0)):
        dealt = []
        for rank in range(4):
            sampler = sampler_of(monkeypatch, range(count), rank, 4)
            sampler.load_state_dict({"epoch": 0, "processed_num": processed})
            assert len(sampler) == 1
            dealt += list(sampler)
        assert set(dealt[:1]) == {sampler.remaining_indices[0]}


def test_set_epoch_goes_on_with_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(monkeypatch, range(10), 0, 2)
    first = list(sampler)
    sampler.record_batch(0, 2)
    assert list(sampler) == first  # until the epoch is divided again
    sampler.set_epoch(0)
    assert list(sampler) == first[2:]
    assert sampler.processed_num == 4
    sampler.record_batch(1, 3)
    with pytest.warns(UserWarning, match=r"all samples of this epoch are processed.*set_epoch\(1\)"):
        sampler.set_epoch(0)
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert (sampler.processed_num, len(sampler)) == (0, 5)
    assert list(sampler) != first
    with pytest.raises(ValueError, match="batch_size=-1"):
        sampler.record_batch(0, -1)
