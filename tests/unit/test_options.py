"""The options of the four functions that start ranks, and of the doctor: written out for editors, declared once."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import spark_hvd
from spark_hvd.runner.config import GROUPS, RunConfig
from spark_hvd.runner.elastic.config import ElasticConfig
from spark_hvd.runner.launch.arguments import folded
from spark_hvd.runner.options import Option, options_of

DECLARED = {
    "run": RunConfig,
    "run_local": RunConfig,
    "run_elastic": ElasticConfig,
    "run_elastic_local": ElasticConfig,
    "doctor": RunConfig,
}
NO_OPTIONS = {"fn", "args", "kwargs", "data", "data_store", "spark", "store", *GROUPS}
IN_GROUPS = {option for kind in GROUPS.values() for option in options_of(kind)}


@pytest.mark.parametrize("name", DECLARED)
def test_a_signature_has_the_types_and_defaults_of_the_declaration(name: str) -> None:
    declared = {each.name: each for each in fields(DECLARED[name])}
    parameters = inspect.signature(getattr(spark_hvd, name)).parameters
    assert parameters.keys() - declared.keys() <= NO_OPTIONS
    if name in ("run", "run_elastic"):
        assert declared.keys() == (parameters.keys() - NO_OPTIONS) | IN_GROUPS
    for option in parameters.keys() & declared.keys():
        if option == "env":  # None means no changes
            continue
        if option == "num_proc" and name.endswith("local"):
            assert (parameters[option].annotation, parameters[option].default) == ("int", 2)
            continue
        assert parameters[option].annotation == declared[option].type, option
        assert parameters[option].default == declared[option].default, option


@pytest.mark.parametrize("name", DECLARED)
def test_the_docstring_tells_of_every_argument_in_their_order(name: str) -> None:
    function = getattr(spark_hvd, name)
    told = re.search(r"Args:\n(.*?)\n\nReturns:", function.__doc__, re.DOTALL)
    assert told is not None
    assert re.findall(r"^    (\w+): \S", told[1], re.MULTILINE) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize(("wrong", "closest"), [("np", "num_proc"), ("back_end", "backend")])
def test_an_unknown_option_is_named_with_the_closest(name: str, wrong: str, closest: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an .* argument '{wrong}'\. Did you mean '{closest}'\?"):
        getattr(spark_hvd, name)(**{wrong: 2})


def test_an_option_unlike_any_is_named_with_all() -> None:
    with pytest.raises(TypeError, match=r"'xyzzy'\. Expected one of num_proc, data, backend, env, "):
        spark_hvd.run_local(len, xyzzy=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(set(DECLARED) - {"doctor"}))
def test_options_of_a_group_are_arguments_with_a_warning(name: str) -> None:
    with (
        pytest.warns(
            DeprecationWarning, match=rf"{name}\(ports=\.\.\.\) is .* network=spark_hvd.Network\(ports="
        ) as warned,
        pytest.raises(ValueError, match="ports='high'"),
    ):
        getattr(spark_hvd, name)(len, ports="high")
    assert warned[0].filename == __file__, "it names the line that is to be changed"


def test_a_group_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"network='eth1': expected a spark_hvd\.Network"):
        spark_hvd.run_local(len, network="eth1")  # type: ignore[arg-type]


def test_a_config_travels_without_what_belongs_to_this_program() -> None:
    config = RunConfig.of({"num_proc": 2, "reporting": spark_hvd.Reporting(stdout=sys.stdout, progress="plain")})
    there = pickle.loads(pickle.dumps(config))
    assert there == RunConfig(num_proc=2, progress="plain")
    assert config.stdout is sys.stdout


def test_the_groups_tell_of_every_option() -> None:
    for kind in GROUPS.values():
        assert re.findall(r"^    (\w+): \S", kind.__doc__ or "", re.MULTILINE) == list(options_of(kind))


def test_a_config_of_arguments_takes_what_it_declares() -> None:
    assert RunConfig.of({"network": spark_hvd.Network(ports="1-2"), "num_proc": 3}) == RunConfig(
        num_proc=3, ports="1-2"
    )
    assert folded({"num_proc": 3, "ports": "1-2"}) == {"num_proc": 3, "network": spark_hvd.Network(ports="1-2")}
    assert RunConfig.of({"num_proc": 3, "fn": len, "env": None}) == RunConfig(num_proc=3)
    assert ElasticConfig.of({"num_proc": 2, "min_num_proc": 1}).limits.min_num_proc == 1


@pytest.mark.parametrize(
    ("option", "value", "error", "text"),
    [
        (
            Option("", least=1, unit="ranks", none="for all"),
            0,
            ValueError,
            "a whole number of ranks, at least 1, or None f",
        ),
        (Option("", least=0), True, TypeError, "a whole number, at least 0"),
        (Option("", seconds=True), float("nan"), ValueError, "a number of seconds above 0"),
        (Option("", above_0=True), -1.5, ValueError, "a number above 0"),
        (Option("", seconds=True), "5", TypeError, "a number of seconds above 0"),
        (Option("", choices=("a", "b")), "c", ValueError, "one of 'a', 'b'"),
    ],
)
def test_checks(option: Option, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(f"x={value!r}: expected {text}")):
        option.check("x", value)
    option.check("x", None)


def test_the_page_about_run_has_all_of_its_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text().split("\n## ")[1]
    named = {name for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"\w+", cell)}
    assert named == set(inspect.signature(spark_hvd.run).parameters)


def test_every_field_says_what_it_means() -> None:
    assert all(each.text for each in options_of(ElasticConfig).values())
