"""Runs the smoke test, and the unit and contract tests, on the combinations of versions that we support.

    python tests/matrix.py                        # rows that need this Python, and no torch but the pinned one
    python tests/matrix.py lowest py3.12          # rows by name; those with PyPI's torch for CUDA take gigabytes
    python tests/matrix.py --smoke spark35        # the smoke test only
    python tests/matrix.py --build spark35        # only build the environment, without tests

Each row is a virtual environment below build/matrix. It is kept, and built again when its packages change. At the end,
a table is printed in the form of docs/versions.md. The exit status is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
HERE = "{}.{}".format(*sys.version_info)
TORCH = "torch==2.13.0"
"""The pin of constraints.txt, which says which wheel that is; others may bring CUDA."""
EXTRAS = "spark,lightning,mpi,petastorm"
TOOLS = ("pytest", "pytest-timeout")
LOWEST = (
    "pyspark==3.5.0",
    "pyarrow==18.0.0",
    "pandas==2.2.0",
    "numpy==1.26.0",
    "cloudpickle==3.0.0",
    "pyzmq==26.0.0",
    "psutil==5.9.0",
    "fsspec==2024.2.0",
    "s3fs==2024.2.0",
    "click==8.1.0",
    "rich==13.7.0",
    "safetensors==0.4.0",
    "lightning==2.4.0",
    "mpi4py==4.1.0",
    "mpich==5.0.0",
)
MXNET = (
    "mxnet==1.9.1",
    "numpy==1.23.5",
    "pyarrow==25.0.0",
    "pandas==2.3.3",
    "cloudpickle>=3",
    "pyzmq>=26",
    "psutil>=5.9",
    "fsspec>=2024.2",
    "click>=8.1",
    "rich>=13.7",
)
"""What spark_hvd needs, with a numpy below its floor: MXNet uses names that 1.24 lacks; pyarrow 26 needs numpy 2."""
SHOWN = ("pyspark", "torch", "pyarrow", "pandas", "numpy", "lightning")
SMOKE = ("tests/smoke.py", "tests/unit/test_private_names.py", "tests/spark/test_private_names.py")
DEFAULT = ("spark35", "newest", "client", "mxnet", "jax")
SUITES = ("tests/unit", "tests/contract")
MXNET_SMOKE = ("tests/mxnet_smoke.py", "tests/unit/test_doors.py", "tests/unit/test_docs_site.py", "-k", "mxnet")
JAX_SMOKE = ("tests/jax_smoke.py", "tests/unit/test_doors.py", "tests/unit/test_docs_site.py", "-k", "jax")
PANDAS_SMOKE = ("tests/smoke.py", "tests/contract/test_reader_values.py", "-k", "not petastorm and not connect")
CLIENT_SMOKE = ("tests/client_smoke.py",)
CLIENTS = ("4.0", "4.1", "4.2")
"""Versions of pyspark-client and of PySpark's Connect server; each client is tried with each server."""
DATABRICKS_SMOKE = ("tests/databricks_smoke.py",)
DATABRICKS = ("databricks-connect", "pyarrow<26", "pandas<3")
"""As in runner/spark/needed.py. Up to Python 3.11 it needs numpy below 2, with which pyarrow 26 does not work."""
ICEBERG_SMOKE = ("tests/iceberg_smoke.py",)
ICEBERG = "snowpark-connect-deps-iceberg"
"""Iceberg's jars for Spark 3.5: the only ones in a Python package. There is none with Delta's."""
STORES = ("moto[server]>=5", "gcp-storage-emulator")
STORES_SMOKE = ("tests/stores_smoke.py", "tests/contract/test_stores.py")
HADOOP = "pyspark-3.0.1"
STORES_BESIDE = (
    ("npm", "install", "--silent", "--global", "--prefix", ".", "azurite"),
    ("bin/python", "-m", "pip", "download", "-qq", "--no-deps", "--dest", "hadoop", HADOOP.replace("-", "==")),
    ("tar", "xzf", f"hadoop/{HADOOP}.tar.gz", "-C", "hadoop", "--strip-components=3", f"{HADOOP}/deps/jars"),
    ("rm", f"hadoop/{HADOOP}.tar.gz"),
)
"""Servers that are not Python packages: of Azure's storage, and of HDFS, whose jars no later PySpark has."""
LEFT_OUT = ("test_docs_site", "test_wheel")
"""Test modules that do not depend on a row's versions, and need tools in our versions."""


_building_servers = threading.Lock()  # rows share them
_installing = threading.Lock()  # setuptools writes the metadata of an editable install next to pyproject.toml


@dataclass(frozen=True)
class Row:
    """A combination of versions.

    Attributes:
        name: Name of the row and its folder.
        python: Major and minor version of Python.
        pins: Packages that pip must install, besides those that follow from the other fields.
        constraints: Whether all other packages are those of constraints.txt.
        extras: Our extras; None for spark_hvd without its dependencies.
        smoke: The tests that every run of the row includes. A row with other tests than the usual ones has no suites.
        beside: Commands that install what pip does not, in the row's folder.
        servers: Versions of Spark whose Connect servers the tests use, besides that of this Python.
    """

    name: str
    python: str
    pins: tuple[str, ...]
    constraints: bool = False
    extras: str | None = EXTRAS
    smoke: tuple[str, ...] = SMOKE
    beside: tuple[tuple[str, ...], ...] = ()
    servers: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the environment."""
        return FOLDER / self.name

    @property
    def executable(self) -> Path:
        """The Python of the environment."""
        return self.folder / "bin" / "python"


def rows() -> dict[str, Row]:
    """Return all rows."""
    low = ("pyspark>=3.5,<3.6", "pyarrow==18.0.0", "pandas==2.2.0", "lightning==2.4.0", TORCH)
    found = [
        Row("spark35", HERE, low),
        Row("newest", HERE, (TORCH, "pyspark[connect]")),
        Row("lowest", "3.10", (*LOWEST, "torch==2.8.0")),
        Row("client", HERE, (TORCH, "pyspark-client"), extras="connect,torch", smoke=CLIENT_SMOKE),
        *(
            Row(
                f"client{version}",
                HERE,
                (TORCH, f"pyspark-client=={version}.*"),
                extras="connect,torch",
                smoke=(*CLIENT_SMOKE, "-k", "not cross_validator"),
                servers=CLIENTS,
            )
            for version in CLIENTS
        ),
        Row("databricks", HERE, (TORCH, *DATABRICKS), extras="torch", smoke=DATABRICKS_SMOKE),
        Row("databricks3.12", "3.12", DATABRICKS, extras="", smoke=DATABRICKS_SMOKE),
        Row("iceberg", HERE, (TORCH, "pyspark==3.5.*", ICEBERG), extras="spark,torch,iceberg", smoke=ICEBERG_SMOKE),
        Row("mxnet", "3.11", (TORCH, *MXNET), extras=None, smoke=MXNET_SMOKE),
        Row("jax", "3.11", (TORCH, "jax==0.10.2"), extras="spark,jax", smoke=JAX_SMOKE),
        Row("pandas3", HERE, (TORCH, "pyspark", "pandas>=3"), extras="lightning,mpi", smoke=PANDAS_SMOKE),
        Row(
            "stores",
            HERE,
            (TORCH, *STORES),
            extras="spark,torch,s3,gcs,azure,hdfs",
            constraints=True,
            smoke=STORES_SMOKE,
            beside=STORES_BESIDE,
        ),
        Row("torch28", HERE, ("torch==2.8.0",)),
        *(Row(f"py{version}", version, (TORCH,), constraints=True) for version in ("3.10", "3.12", "3.13")),
    ]
    return {row.name: row for row in found}


def server(version: str) -> Row:
    """Return a row that only runs a Spark Connect server and its ranks, without tests."""
    return Row(f"server{version}", HERE, (TORCH, f"pyspark=={version}.*"), extras="spark,torch")


def interpreter(version: str) -> str:
    """Return a Python of this version: this one, one on PATH, or one of pyenv."""
    if version == HERE:
        return sys.executable
    for root in os.environ.get("PATH", "").split(os.pathsep):
        if (path := Path(root, f"python{version}")).exists() and not path.parent.match("shims"):
            return str(path)
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    if not kept:
        raise SystemExit(f"python{version} is neither on PATH nor in pyenv: install it, or leave its row out")
    return str(kept[-1])


def build(row: Row, extras: str | None) -> None:
    """Build the environment, unless it exists with the wanted packages."""
    constraints = ["-c", str(ROOT / "constraints.txt")] if row.constraints else []
    wanted = [*row.pins, *TOOLS, "-e", f".[{extras}]", *constraints]
    files = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    beside = [word for command in row.beside for word in command]
    mark = hashlib.sha256("\n".join([row.python, *wanted, *beside, *files]).encode()).hexdigest()
    done = row.folder / "made"
    if done.exists() and done.read_text() == mark:
        return
    shutil.rmtree(row.folder, ignore_errors=True)
    row.folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([interpreter(row.python), "-m", "venv", str(row.folder)], check=True)
    if TORCH in row.pins and row.python == HERE:
        _link_torch(row)
    # The tests of a row import a part of what is installed, which Python compiles at the first import.
    install = [row.executable, "-m", "pip", "install", "-qq", "--no-compile"]
    if extras is None:
        subprocess.run([*install, *row.pins, *TOOLS], cwd=ROOT, check=True)
        ours = ["--no-deps", "-e", "."]
    else:
        ours = [*row.pins, *TOOLS, "-e", f".[{extras}]" if extras else "."]
    with _installing:
        subprocess.run([*install, *ours, *constraints], cwd=ROOT, check=True)
    for command in row.beside:
        subprocess.run(command, cwd=row.folder, check=True)
    done.write_text(mark)


def build_all(row: Row, extras: str | None) -> None:
    """Build the environments of a row and of its servers."""
    build(row, extras)
    for version in row.servers:
        with _building_servers:
            build(server(version), server(version).extras)


def _link_torch(row: Row) -> None:
    """Link torch into the row, if this environment has the same version, rather than copying it. pip keeps it."""
    inside = Path("lib", f"python{row.python}", "site-packages")
    ours, theirs = Path(sys.prefix, inside), row.folder / inside
    if not list(ours.glob(f"{TORCH.replace('==', '-')}*.dist-info")):
        return
    for path in [ours / "torch", ours / "torchgen", ours / "functorch", *ours.glob("torch-*.dist-info")]:
        shutil.copytree(path, theirs / path.name, copy_function=_link, symlinks=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def versions(row: Row) -> list[str]:
    """Return the versions of Python and of the packages in the table."""
    program = (
        "import sys, platform, importlib.metadata as meta; got = {d.name: d.version for d in meta.distributions()}"
    )
    program += "; print(platform.python_version(), *(got.get(name, '-') for name in sys.argv[1:]))"
    done = subprocess.run([row.executable, "-c", program, *SHOWN], capture_output=True, text=True, check=True)
    return done.stdout.split()


def run(row: Row, smoke_only: bool) -> list[str]:
    """Build a row and run its tests.

    Returns:
        Its cells in the table: its versions, then the outcome of each part.
    """
    started = time.monotonic()
    log = FOLDER / f"{row.name}.log"
    log.unlink(missing_ok=True)
    try:
        build_all(row, row.extras if smoke_only or row.smoke != SMOKE else f"dev,{EXTRAS}")
    except subprocess.CalledProcessError as error:
        return [row.name, row.python, *["?"] * len(SHOWN), f"not installed: exit {error.returncode}"]
    print(f"{row.name}: installed after {time.monotonic() - started:.0f} s", flush=True)
    cells = [row.name, *versions(row), _tests(row, row.smoke, log)]
    if row.smoke != SMOKE:
        cells += [] if smoke_only else ["-" for _ in SUITES]
    elif not smoke_only:
        left_out = [f"--ignore-glob=*/{name}.py" for name in LEFT_OUT]
        cells += [_tests(row, (suite, "-m", "not slow and not gpu and not night", *left_out), log) for suite in SUITES]
    told = ", ".join(cells[len(SHOWN) + 2 :])
    print(f"{row.name}: {told}, after {time.monotonic() - started:.0f} s", flush=True)
    return cells


def _tests(row: Row, arguments: tuple[str, ...], log: Path) -> str:
    """Return the outcome of tests: "14 passed", or the names of those that failed."""
    report = FOLDER / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    command = [row.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    environment = {
        **os.environ,
        "SPARK_HVD_SERVERS": os.pathsep.join([sys.executable, *(str(server(each).executable) for each in row.servers)]),
        "PATH": f"{row.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    with log.open("a") as output:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False).returncode
    if not report.exists():
        return f"failed: exit {code}, see {log}"
    counts, failed = Counter[str](), []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = next((name for name in ("failure", "error", "skipped") if name in kinds), "passed")
        counts[kind] += 1
        if kind in ("failure", "error"):
            failed.append(str(case.get("name")))
    told = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "skipped") if counts[kind])
    if failed or code:
        return f"{told}, {len(failed)} failed: {' '.join(failed)} (see {log})"
    return told


def table(cells: list[list[str]], smoke_only: bool) -> str:
    """Return the table in Markdown."""
    head = ["row", "Python", *SHOWN, "smoke", *(() if smoke_only else SUITES)]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Run the requested rows."""
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(known)}; default: {', '.join(DEFAULT)}")
    parser.add_argument("--smoke", action="store_true", help="leave the suites out")
    parser.add_argument("--build", action="store_true", help="leave the smoke out, too: install what it needs")
    parser.add_argument("--jobs", type=int, default=2, help="rows at the same time")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(known):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = [known[name] for name in options.rows or DEFAULT]
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.build:
            list(pool.map(lambda row: build_all(row, row.extras), chosen))
            return 0
        cells = list(pool.map(lambda row: run(row, options.smoke), chosen))
    print(table(cells, options.smoke))
    bad = [line[0] for line in cells if any("failed" in cell or "not installed" in cell for cell in line)]
    for name in bad:
        log = FOLDER / f"{name}.log"
        print(f"\n{log}:", *log.read_text().splitlines()[-80:] if log.exists() else (), sep="\n")
        print(f"row {name} of the matrix FAILED")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
