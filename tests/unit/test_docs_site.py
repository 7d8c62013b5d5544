"""The documentation site builds without a warning, has no broken links, and needs no other server."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import spark_hvd
import spark_hvd.torch as hvd
from spark_hvd.transport.communicator import ReduceOp

KERAS_OWN = {"DistributedOptimizer", "allgather", "allreduce", "broadcast", "reducescatter"}
"""Names in spark_hvd.torch that have another meaning in spark_hvd.keras."""
TENSORFLOW_OWN = {
    "DistributedOptimizer", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "reducescatter",
}  # fmt: skip
"""The same for spark_hvd.tensorflow."""
MXNET_OWN = TENSORFLOW_OWN | {"allreduce_", "broadcast_parameters", "grouped_allreduce_"}
"""The same for spark_hvd.mxnet."""
JAX_OWN = {"broadcast", "init"}
"""The same for spark_hvd.jax."""
OTHER_FRAMEWORKS: list[tuple[str, set[str]]] = [
    ("spark_hvd.keras", {*hvd.__all__, "callbacks"} - KERAS_OWN),
    ("spark_hvd.keras.callbacks", set()),
    ("spark_hvd.keras.elastic", {"run", "State", "ObjectState", "HostsUpdatedInterrupt"}),
    ("spark_hvd.tensorflow", {*hvd.__all__, "SyncBatchNormalization"} - TENSORFLOW_OWN),
    ("spark_hvd.mxnet", {*hvd.__all__} - MXNET_OWN),
    ("spark_hvd.jax", {*hvd.__all__} - JAX_OWN),
    ("spark_hvd.tensorflow.elastic", {"State", "ObjectState", "HostsUpdatedInterrupt"}),
]
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@dataclass
class Html(HTMLParser):
    """Collects what a page links to, what it loads, and its link targets."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "link", "script", "iframe", "source"):
            self.loads += [given[name] for name in ("href", "src") if name in given]


@dataclass(frozen=True)
class Site:
    folder: Path
    pages: dict[str, Html]

    def misses(self, page: str, link: str) -> str | None:
        """Return why a link on a page is broken; None if it works, or leads to another site."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            good = parts.scheme in ("https", "mailto") and (parts.netloc or parts.path) and " " not in link
            return None if good else "not https"
        path = unquote(parts.path)
        target = self.folder / path[1:] if path.startswith("/") else (self.folder / page).parent / path
        target = target.resolve() if path else self.folder / page
        if target.is_dir():
            target /= "index.html"
        if not target.is_file():
            return "no such file"
        anchors = self.pages[str(target.relative_to(self.folder))].anchors if target.suffix == ".html" else set()
        return "no such anchor" if parts.fragment and unquote(parts.fragment) not in anchors else None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = ROOT / "out" / "site"
    if not ("CI" in os.environ and folder.exists()):  # .ci/run builds it anew, while other tests wait
        folder = tmp_path_factory.mktemp("site").resolve()
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "WARNING" not in done.stderr
    pages = {}
    for path in folder.rglob("*.html"):
        page = pages[str(path.relative_to(folder))] = Html()
        page.feed(path.read_text())
    return Site(folder, pages)


@pytest.mark.slow
def test_each_link_leads_somewhere(site: Site) -> None:
    assert sum(len(page.links) for page in site.pages.values()) > 1000
    wrong = {
        f"{name} -> {link}: {why}"
        for name, page in site.pages.items()
        for link in page.links + page.loads
        if (why := site.misses(name, link))
    }
    assert wrong == set()


@pytest.mark.slow
def test_the_checker_sees_what_is_wrong(site: Site) -> None:
    assert site.misses("index.html", "run.html#arguments") is None
    assert site.misses("api/torch.html", "../run.html") is None
    assert site.misses("index.html", "run.html#argument") == "no such anchor"
    assert site.misses("index.html", "runs.html") == "no such file"
    assert site.misses("index.html", "http://example.com/") == "not https"


@pytest.mark.slow
def test_nothing_comes_from_another_server(site: Site) -> None:
    foreign = {load for page in site.pages.values() for load in page.loads if urlsplit(load).netloc}
    assert foreign == set()


@pytest.mark.slow
def test_the_search_works_in_a_folder(site: Site) -> None:
    for name, page in site.pages.items():
        assert any(load.endswith("/iframe-worker.js") or load == "iframe-worker.js" for load in page.loads), name
    index = (site.folder / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {")
    assert "run.html#arguments" in index
    assert "repository/examples" not in index


@pytest.mark.slow
def test_llms_txt_says_what_each_page_is_about(site: Site) -> None:
    text = (site.folder / "llms.txt").read_text()
    assert text.startswith("# spark_hvd\n\n> Distributed deep-learning training")
    links = dict(re.findall(r"^- \[[^]]+\]\(([^)]+)\)(.*)$", text, re.MULTILINE))
    assert {link: why for link in links if (why := site.misses("index.html", link))} == {}
    assert links["run-data.html"].startswith(": run(fn, data=...) hands data sets to the ranks")
    told = [link for link, about in links.items() if about]
    assert len(told) > 0.8 * len(links) > 50


@pytest.mark.slow
def test_long_signatures_fold(site: Site) -> None:
    page = (site.folder / "api" / "spark_hvd.html").read_text()
    short = 1  # warm_up's
    assert page.count("<details><summary>Signature</summary>") == page.count('class="doc-signature') - short > 0
    assert "On GitHub" not in page


@pytest.mark.slow
def test_no_two_pages_have_one_title(site: Site) -> None:
    titles = [re.search("<title>(.*?)</title>", (site.folder / name).read_text())[1] for name in site.pages]  # type: ignore[index]
    assert len(set(titles)) == len(titles)


@pytest.mark.slow
def test_each_page_is_in_the_navigation(site: Site) -> None:
    linked = {urlsplit(link).path for link in site.pages["index.html"].links}
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in PAGES} - {"index.html"}
    assert pages - linked == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_lists_and_tables_begin_after_a_blank_line(page: Path) -> None:
    # GitHub shows them correctly, but Python's Markdown makes one paragraph of them
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n\s*\n", text)
    item = re.compile(r"(- |\d+\. |\|)")
    late = [block for block in blocks if not item.match(block) and re.search(r"^(- |\d+\. |\|)", block, re.MULTILINE)]
    assert [block for block in late if not block.startswith((" ", "<!--"))] == []


@pytest.mark.parametrize(
    ("module", "elsewhere"),
    [
        ("spark_hvd", {"__version__", "DataError", "HostsUpdatedInterrupt", *hvd.__all__}),
        ("spark_hvd.torch", {*ReduceOp.__members__, "HorovodInternalError", "checkpoint", "elastic"}),
        ("spark_hvd.torch.elastic", set()),
        ("spark_hvd.checkpoint", set()),
        ("spark_hvd.data", set()),
        ("spark_hvd.estimators", set()),
        ("spark_hvd.runner", {*spark_hvd.__all__}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_FRAMEWORKS),
    ],
)
def test_each_public_name_is_described(module: str, elsewhere: set[str]) -> None:
    if module.startswith(("spark_hvd.jax", "spark_hvd.keras", "spark_hvd.mxnet", "spark_hvd.tensorflow")):
        pytest.importorskip(module.split(".")[1])
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", pages, re.MULTILINE))
    known = {name.upper() for name in elsewhere}
    assert described == {name for name in importlib.import_module(module).__all__ if name.upper() not in known}
