"""The values of named collectives: their ranges, and Horovod's variables for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from spark_hvd.world.config import NAMES, Config
from spark_hvd.world.env import read_config


def test_nothing_set() -> None:
    assert read_config({}) == read_config({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_UNHEARD_OF": "x"}) == Config()
    assert Config().fusion_threshold == 128 << 20
    assert Config().cache_capacity == 1024
    assert Config().stall_warning == 60.0
    assert Config().stall_timeout is None


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("FUSION_THRESHOLD", "67108864", "fusion_threshold", 64 << 20),
        ("FUSION_THRESHOLD", "0", "fusion_threshold", 0),
        ("CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("STALL_CHECK_TIME_SECONDS", "2.5", "stall_warning", 2.5),
        ("STALL_CHECK_DISABLE", "1", "stall_warning", None),
        ("STALL_CHECK_DISABLE", "0", "stall_warning", 60.0),
        ("STALL_SHUTDOWN_TIME_SECONDS", "90", "stall_timeout", 90.0),
        ("STALL_SHUTDOWN_TIME_SECONDS", "0", "stall_timeout", None),
        ("TIMELINE", "/tmp/timeline.json", "timeline", "/tmp/timeline.json"),
        ("TIMELINE", "DYNAMIC", "timeline", None),
        ("TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
        ("AUTOTUNE", "1", "autotune", True),
        ("AUTOTUNE", "0", "autotune", False),
        ("AUTOTUNE", "False", "autotune", False),
        ("AUTOTUNE_LOG", "tried.csv", "autotune_log", "tried.csv"),
        ("AUTOTUNE_WARMUP_SAMPLES", "0", "autotune_warmup_samples", 0),
        ("AUTOTUNE_STEPS_PER_SAMPLE", "7", "autotune_steps_per_sample", 7),
        ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "5", "autotune_max_samples", 5),
    ],
)
def test_one_variable(variable: str, text: str, name: str, value: Any) -> None:
    assert read_config({f"HOROVOD_{variable}": text}) == Config(**{name: value})


def test_an_empty_variable_is_not_set() -> None:
    assert read_config({"HOROVOD_FUSION_THRESHOLD": "", "HOROVOD_TIMELINE": "", "HOROVOD_AUTOTUNE": ""}) == Config()


def test_no_warnings_whatever_their_time() -> None:
    config = read_config({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"})
    assert config.stall_warning is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [("FUSION_THRESHOLD", "64MB"), ("CACHE_CAPACITY", "1.5"), ("STALL_CHECK_TIME_SECONDS", "soon")],
)
def test_no_number(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^HOROVOD_{variable}='{text}' in the environment is not a number"):
        read_config({f"HOROVOD_{variable}": text})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("fusion_threshold", -1, 0),
        ("cache_capacity", -1, 0),
        ("stall_warning", -0.5, 0),
        ("stall_timeout", float("nan"), 0),
        ("autotune_warmup_samples", -1, 0),
        ("autotune_steps_per_sample", 0, 1),
        ("autotune_max_samples", 0, 1),
    ],
)
def test_out_of_range(name: str, value: Any, least: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value}: expected {least} or more"):
        Config(**{name: value})


def test_the_environment_is_held_to_the_same_ranges() -> None:
    with pytest.raises(ValueError, match="fusion_threshold=-1"):
        read_config({"HOROVOD_FUSION_THRESHOLD": "-1"})


def test_names_are_those_of_the_values() -> None:
    assert set(NAMES) == set(dataclasses.asdict(Config()))


def test_a_config_stays_as_it_is() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().fusion_threshold = 1  # type: ignore[misc]
