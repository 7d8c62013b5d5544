"""The bucket plan as data: packing, order, groups, and the message that names what differs between ranks."""

from __future__ import annotations

import pytest
import torch

from spark_hvd.torch.optimizer.buckets import ParamSpec, describe_mismatch, fingerprint, plan_buckets, split_evenly


def spec(name: str, numel: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ParamSpec:
    return ParamSpec(name, (numel,), (1,), dtype, device)


def members(plans: tuple[object, ...]) -> list[tuple[int, ...]]:
    return [plan.members for plan in plans]  # type: ignore[attr-defined]


def test_every_parameter_is_in_one_bucket_and_none_overlaps() -> None:
    specs = [spec(str(i), 10 + 7 * i) for i in range(20)]
    plans = plan_buckets(specs, list(reversed(range(20))), cap_bytes=1000, tail_bytes=300)
    assert sorted(i for plan in plans for i in plan.members) == list(range(20))
    for plan in plans:
        ends = [start + specs[i].numel for i, start in zip(plan.members, plan.offsets, strict=True)]
        assert all(end <= start for end, start in zip(ends, plan.offsets[1:], strict=False))
        assert ends[-1] == plan.numel
        assert all(offset * 4 % 64 == 0 for offset in plan.offsets)


def test_buckets_come_in_the_order_in_which_they_complete() -> None:
    specs = [spec(str(i), 100) for i in range(6)]
    plans = plan_buckets(specs, [5, 3, 4, 0, 2, 1], cap_bytes=800, tail_bytes=400)
    assert members(plans) == [(5,), (3, 4), (0, 2), (1,)]


def test_the_last_bucket_is_the_small_one() -> None:
    specs = [spec(str(i), 100) for i in range(8)]
    plans = plan_buckets(specs, range(8), cap_bytes=2800, tail_bytes=400)
    assert members(plans) == [tuple(range(7)), (7,)]


def test_a_bias_stays_with_its_large_weight() -> None:
    specs = [spec("w1", 10_000), spec("b1", 10), spec("w2", 10_000), spec("b2", 10)]
    plans = plan_buckets(specs, [3, 2, 1, 0], cap_bytes=20_000, tail_bytes=20_000)
    assert members(plans) == [(3, 2), (1, 0)]


def test_dtypes_and_devices_do_not_mix() -> None:
    specs = [spec("a", 4), spec("b", 4, torch.float64), spec("c", 4, device="cuda:0"), spec("d", 4)]
    plans = plan_buckets(specs, range(4), cap_bytes=1000, tail_bytes=1000)
    assert sorted(members(plans)) == [(0, 3), (1,), (2,)]


def test_a_group_is_one_bucket_whatever_the_cap() -> None:
    specs = [spec(str(i), 100) for i in range(6)]
    plans = plan_buckets(specs, [5, 4, 3, 2, 1, 0], [[5, 1, 2]], cap_bytes=100, tail_bytes=100)
    assert members(plans) == [(4,), (3,), (5, 2, 1), (0,)]


def test_group_members_without_gradient_are_left_out() -> None:
    specs = [spec(str(i), 1) for i in range(3)]
    assert members(plan_buckets(specs, [2, 0], [[0, 1]], cap_bytes=99, tail_bytes=99)) == [(2,), (0,)]


@pytest.mark.parametrize(("count", "parts", "lengths"), [(5, 2, [2, 3]), (3, 5, [1, 1, 1]), (4, 0, []), (0, 3, [])])
def test_split_evenly(count: int, parts: int, lengths: list[int]) -> None:
    runs = split_evenly(range(count), parts)
    assert [len(run) for run in runs] == lengths
    assert [i for run in runs for i in run] == (list(range(count)) if lengths else [])


def test_mismatch_names_the_parameter_and_what_differs() -> None:
    ours = [spec("conv", 4).fields(), spec("fc.weight", 8).fields()]
    theirs = [spec("conv", 4).fields(), spec("fc.weight", 9).fields()]
    text = describe_mismatch([ours, ours, theirs], [{}, {}, {}])
    assert "parameter 1" in text
    assert "'fc.weight'" in text
    assert "rank 2" in text
    assert "[8]" in text
    assert "[9]" in text


def test_mismatch_of_count_and_settings() -> None:
    ours = [spec("a", 4).fields(), spec("b", 4).fields()]
    assert "'b' exists on rank 0 only" in describe_mismatch([ours, ours[:1]], [{}, {}])
    assert "op is 'SUM' on rank 0" in describe_mismatch([ours, ours], [{"op": "SUM"}, {"op": "AVERAGE"}])


def test_fingerprint_ignores_the_device_index_only() -> None:
    assert fingerprint([spec("a", 4, device="cuda:0")], {}) == fingerprint([spec("a", 4, device="cuda:1")], {})
    assert fingerprint([spec("a", 4)], {}) != fingerprint([spec("a", 4, torch.float64)], {})
    assert fingerprint([spec("a", 4)], {"op": "SUM"}) != fingerprint([spec("a", 4)], {"op": "AVERAGE"})
