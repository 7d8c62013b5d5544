"""Hooks of mkdocs: files of the repository that pages link to become pages of the site themselves.

Also writes llms.txt, which tells programs that read for their users what each page is about.

The pages link to ``../examples/flights.py``, as a repository wants it. The site stands for itself, so each such file,
and what it links to in turn, is shown under ``repository/``: Markdown as it is, anything else as a block of code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml"}
ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
SEARCH = {"run.md": 100, "estimators.md": 50, "api/estimators.md": 0.01}
"""Weights of pages: the guides to arguments come before a reference whose headings begin like an argument's name."""
ON_GITHUB = re.compile(r"^\*On GitHub .*\*\n", re.MULTILINE)  # what is said to those who do not read the site
SIGNATURE = re.compile(r'<div class="doc-signature highlight">.*?</div>', re.DOTALL)
LONG = 8  # lines of a signature that is folded
IN_NAV = ("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file outside of docs/ that a page links to, and for every file that those link to."""
    root = Path(config.config_file_path).parent
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting = [*IN_NAV, *(target for page in pages for target in _targets(root, page))]
    added: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in added or path.startswith("docs/") or not (root / path).is_file():
            continue
        added.add(path)
        files.append(File.generated(config, _page_of(path), content=_content(root, path)))
        waiting += _targets(root, path)
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keeps the order of pages."""
    _order[:] = [each for each in nav.items if isinstance(each, Section)]


_order: list[Section] = []


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Adds llms.txt: for each page a link, and the first sentence of its text."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section in _order:
        lines += ["", f"## {section.title}", ""]
        lines += [f"- [{page.title}]({page.url}){_first_sentence(page.markdown or '')}" for page in _pages_in(section)]
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))


def _pages_in(section: Section) -> list[Page]:
    inner = [_pages_in(each) if isinstance(each, Section) else [each] for each in section.children]
    return [page for pages in inner for page in pages if isinstance(page, Page)]


def _first_sentence(markdown: str) -> str:
    """That of a page's first paragraph, without its marks, behind a colon; nothing where a page begins otherwise."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = next((each for each in re.split(r"\n\s*\n", text) if re.match(r"\s*[\w`*\[]", each)), "")
    words = re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split())))
    return f": {re.split(r'(?<=[.?!]) ', words)[0].removesuffix(':')}" if words else ""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files of the repository at their pages; links to its folders become plain words.

    Also tells the search which pages it shall find first, and that pages of code are not for it.
    """
    root = Path(config.config_file_path).parent
    here = page.file.src_uri
    if here.startswith("repository/") and here.removeprefix("repository/") not in IN_NAV:
        page.meta["search"] = {"exclude": True}
    else:
        page.meta["search"] = {"boost": SEARCH.get(here, 1)}
    source = here.removeprefix("repository/") if here.startswith("repository/") else f"docs/{here}"
    if not (root / source).is_file():  # a page of code
        return markdown

    def pointed(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        path = _resolve(source, link)
        if (root / path).is_dir():
            return text
        if not (root / path).is_file():
            return match[0]  # mkdocs says what is wrong with it
        target = path.removeprefix("docs/") if path.startswith("docs/") else _page_of(path)
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(pointed, ON_GITHUB.sub("", markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Folds long signatures, and takes roles such as ``:func:`` from before the names that they are meant for."""

    def folded(match: re.Match[str]) -> str:
        if match[0].count("\n") < LONG:
            return match[0]
        return f"<details><summary>Signature</summary>{match[0]}</details>"

    return SIGNATURE.sub(folded, ROLE.sub("", html))


def _resolve(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _targets(root: Path, path: str) -> list[str]:
    if not path.endswith(".md"):
        return []
    return [_resolve(path, link) for _, link, _ in LINK.findall((root / path).read_text())]


def _page_of(path: str) -> str:
    return f"repository/{path.removesuffix('.md')}.md"


def _content(root: Path, path: str) -> str:
    text = (root / path).read_text()
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"
