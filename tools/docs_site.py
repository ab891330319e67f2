"""Hooks of mkdocs: they add the pages that lie outside docs/ and the reference, and adapt links to the site.

Pages are written to be read in the repository. On the site, links between pages lead to the site's pages. Links to
sources become text, since the site has no sources.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BROUGHT_IN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    "lab/README.md": "lab.md",
    "benchmarks/results/README.md": "results.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
REFERENCE = """# Reference

The calls and classes of `import zeromesh as zm`, from their docstrings.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    pages = {site: (ROOT / path).read_text() for path, site in BROUGHT_IN.items()}
    pages |= {"reference.md": _reference(), "decisions.md": _decisions()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links and pictures of the repository into those of the site."""
    site = page.file.src_uri
    inside = {made: path for path, made in BROUGHT_IN.items()}
    source = inside.get(site, posixpath.join("docs", site))

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        made = BROUGHT_IN.get(found, found.removeprefix("docs/") if found.startswith("docs/") else "")
        made = "decisions.md" if found == "docs/decisions" else made
        if files.get_file_from_path(made) is None:
            return text
        relative = posixpath.relpath(made, posixpath.dirname(site) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replaces the stand-in for workers that the theme loads from another site: nothing here comes from elsewhere."""
    own = posixpath.relpath("search.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", own)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """Leaves out the page for wrong addresses: the site is opened as files."""
    return "" if template_name == "404.html" else output


def _reference() -> str:
    import zeromesh

    homes: dict[str, str] = vars(zeromesh)["_HOMES"]
    entries = (
        f"::: {homes[name]}.{name}\n    options:\n      heading: zm.{name}\n      toc_label: {name}\n"
        for name in sorted(homes, key=str.lower)
    )
    return REFERENCE + "\n".join(entries)


def _decisions() -> str:
    lines = ["# Decisions\n", "Design decisions, with their reasons and consequences.\n"]
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}](decisions/{path.name})")
    return "\n".join(lines)
