"""A hook of mkdocs: pages link to files of the clone as GitHub reads them, and the site follows or says so.

Results, changes, architecture and the packages' READMEs lie outside docs/ and are pages too. A link to another file
of the clone loses its target in the site, which has no such file, and keeps its text. One to a file that is not there
is a warning, for which `mkdocs build --strict` fails.
"""

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "engine",
    "jobs",
    "worker",
    "sandbox",
    "tokenmill/dashboard",
    "tokenmill/server",
    "tokenmill/eval",
)
_BESIDE = (
    "RESULTS.md",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    *(f"{name}/README.md" for name in _PACKAGES),
)
"""Pages outside docs/, which have the same name in the site."""

_LINK = re.compile(
    r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>(?!\w+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)

log = logging.getLogger("mkdocs.hooks.site_links")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for name in _BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(_ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with each link to a file of the clone as the site has it."""
    name = page.file.src_uri
    source = name if name in _BESIDE else f"docs/{name}"
    return _LINK.sub(lambda link: _in_site(link, source, name), markdown)


def _in_site(link: re.Match[str], source: str, name: str) -> str:
    target = normpath(str(PurePosixPath(source).parent / link["target"]))
    if not (_ROOT / target).exists():
        log.warning("%s links to %s, which is not there", source, target)
    if target not in _BESIDE and not target.startswith("docs/"):
        return link["text"]
    page = target.removeprefix("docs/")
    return f"[{link['text']}]({relpath(page, PurePosixPath(name).parent)}{link['anchor'] or ''})"
