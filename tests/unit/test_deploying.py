"""Commands in the documentation and files of the examples use what exists: Spark's settings, our options, extras."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import spark_hvd.runner
from spark_hvd.runner import cli

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "examples" / "k8s"
PAGES = [ROOT / "docs" / "deploying.md", ROOT / "docs" / "networks.md", KUBERNETES / "README.md"]
COMPOSED = re.compile(
    r"spark\.(driver|executor|task|worker)\.resource\.\w+\.(amount|discoveryScript|vendor)"
    r"|spark\.kubernetes\.authenticate\.(driver\.|executor\.)?serviceAccountName"
)
"""Settings that Spark composes from parts, so no class contains their name."""


def texts() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in [*PAGES, KUBERNETES / "driver.yaml"]}


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in a page's shell blocks, with continued lines joined."""
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [shlex.split(line) for line in lines if line and not line.startswith("%pip")]


@cache
def known_to_spark() -> frozenset[str]:
    """Return the settings in Spark's classes, without SQL's; those that end in a dot are prefixes."""
    import pyspark

    names: set[bytes] = set()
    jars = Path(pyspark.__file__).parent / "jars"
    for jar in (found for part in ("core", "kubernetes", "yarn") for found in jars.glob(f"spark-{part}_*.jar")):
        with zipfile.ZipFile(jar) as archive:
            for member in archive.namelist():
                if member.endswith(".class"):
                    names.update(re.findall(rb"spark\.[A-Za-z0-9_.]+", archive.read(member)))
    return frozenset(name.decode() for name in names)


def is_known(setting: str) -> bool:
    known = known_to_spark()
    beginnings = (setting[: match.end()] for match in re.finditer(r"\.", setting) if match.start() > len("spark"))
    return setting in known or COMPOSED.fullmatch(setting) is not None or any(start in known for start in beginnings)


@pytest.mark.parametrize("page", texts())
def test_settings_are_spark_s(page: str) -> None:
    named = set(re.findall(r"(?<![\w/.-])spark(?:\.[A-Za-z_]\w*)+", texts()[page]))
    settings = {name for name in named if not name.startswith(("spark.apache", "spark.sql.functions"))}
    assert settings
    assert sorted(name for name in settings if not is_known(name)) == []


def test_a_misspelt_setting_is_noticed() -> None:
    assert is_known("spark.executor.memoryOverhead")
    assert is_known("spark.executorEnv.PYSPARK_PYTHON")
    assert not is_known("spark.executor.memoryOverheads")
    assert not is_known("spark.task.resource.gpu.count")
    assert not is_known("spark.kubernetes.executor.podTemplate")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_copied(page: Path) -> None:
    found = commands(page.read_text())
    assert found
    for words in found:
        for option, value in pairwise(words):
            if option == "--conf":
                assert re.fullmatch(r"spark\.[\w.]+=\S.*", value), value
        for word in words:
            path = word.removeprefix("--from-file=")
            if path.startswith("examples/"):
                assert (ROOT / path).exists(), path


def test_arguments_of_run_exist() -> None:
    calls = re.findall(r"\b(run|run_local)\(([^()]*)\)", "\n".join(texts().values()))
    known = set(inspect.signature(spark_hvd.runner.run).parameters) | set(
        inspect.signature(spark_hvd.runner.run_local).parameters
    )
    named = {name for _, inside in calls for name in re.findall(r"(\w+)=", inside)}
    assert "num_proc" in named
    assert sorted(named - known) == []


def test_options_of_the_command_line_exist() -> None:
    found = [words for page in PAGES for words in commands(page.read_text()) if words[0] == "spark-hvd"]
    assert found
    for _, command, *rest in found:
        known = {option for parameter in cli.main.commands[command].params for option in parameter.opts}
        assert [word for word in rest if word.startswith("-") and word not in known] == []


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.name)
def test_files_of_kubernetes(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert all({"apiVersion", "kind"} <= document.keys() for document in documents)


def only(name: str, kind: str) -> dict[str, object]:
    (found,) = [each for each in yaml.safe_load_all((KUBERNETES / name).read_text()) if each["kind"] == kind]
    assert isinstance(found, dict)
    return found


def test_files_of_kubernetes_fit_together() -> None:
    service, job = only("driver.yaml", "Service"), only("driver.yaml", "Job")
    pod = job["spec"]["template"]  # type: ignore[index]
    (driver,) = pod["spec"]["containers"]
    arguments = dict(each.removeprefix("--conf=").split("=", 1) for each in driver["args"] if "=" in each)
    executor = only("executor-template.yaml", "Pod")
    policy = only("network-policy.yaml", "NetworkPolicy")
    assert service["spec"]["clusterIP"] == "None"  # type: ignore[index]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()  # type: ignore[index]
    assert arguments["spark.driver.host"].startswith(service["metadata"]["name"] + ".")  # type: ignore[index]
    assert arguments["spark.kubernetes.container.image"] == driver["image"]
    assert pod["spec"]["serviceAccountName"] == only("rbac.yaml", "ServiceAccount")["metadata"]["name"]  # type: ignore[index]
    label = policy["spec"]["podSelector"]["matchLabels"].items()  # type: ignore[index]
    assert label <= pod["metadata"]["labels"].items()
    assert label <= executor["metadata"]["labels"].items()  # type: ignore[index]
    (rule,) = policy["spec"]["ingress"]  # type: ignore[index]
    opened = {(each["port"], each["endPort"]) for each in rule["ports"]}
    (sysctl,) = executor["spec"]["securityContext"]["sysctls"]  # type: ignore[index]
    assert sysctl["name"] == "net.ipv4.ip_local_port_range"
    assert tuple(map(int, sysctl["value"].split())) in opened
    assert tuple(map(int, arguments["--ports"].split("-"))) in opened
    assert (int(arguments["spark.driver.port"]), int(arguments["spark.blockManager.port"])) in opened


def test_pods_are_not_trusted_more_than_they_need() -> None:
    driver, executor = only("driver.yaml", "Job")["spec"]["template"], only("executor-template.yaml", "Pod")  # type: ignore[index]
    for pod in (driver, executor):
        spec = pod["spec"]  # type: ignore[index]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in spec
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert executor["spec"]["automountServiceAccountToken"] is False  # type: ignore[index]
    assert "automountServiceAccountToken" not in driver["spec"], "the driver makes pods"
    on = {"spark.authenticate=true", "spark.network.crypto.enabled=true", "spark.io.encryption.enabled=true"}
    assert {f"--conf={setting}" for setting in on} <= set(driver["spec"]["containers"][0]["args"])
    in_cluster_mode = [
        words for words in commands(PAGES[0].read_text()) if "--deploy-mode cluster --name" in " ".join(words)
    ]
    assert in_cluster_mode
    assert any(on <= set(words) for words in in_cluster_mode)


def test_the_image() -> None:
    text = (KUBERNETES / "Dockerfile").read_text()
    (extras,) = re.findall(r'"/src\[([\w,]+)\]"', text)
    tables = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", tables, re.M) for extra in extras.split(","))
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        assert all((ROOT / path).exists() for path in source.split())
    assert re.findall(r"^(?:USER|ENTRYPOINT) (.*)$", text, re.M) == ["185", '["/opt/entrypoint.sh"]']


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_gpus_are_discovered(gpus: int, tmp_path: Path) -> None:
    import json

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo {index}\n" for index in range(gpus)))
    tool.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = ROOT / "examples" / "discover_gpus.sh"
    done = subprocess.run([script], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"name": "gpu", "addresses": [str(index) for index in range(gpus)]}
