"""Hooks of mkdocs: pages from elsewhere in the repository, links out of docs/, and help texts.

The Markdown files are written for GitHub, where a link may lead to any file of the repository. On
the site a link becomes a link to the same page; for other files, a link to the repository's host if
`repo_url` is set, otherwise to a copy of the file, as text. A folder becomes its path. The files in
docs/ need no changes for the site.
"""

import io
import json
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from trl_qurl.cli import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[1]

ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "evidence/benchmarks.md",
    "benchmarks/int8.md": "evidence/int8.md",
    "benchmarks/speed.md": "evidence/speed.md",
    "benchmarks/study.md": "evidence/study.md",
    "requirements/README.md": "evidence/versions.md",
    "tests/features.md": "evidence/features.md",
    "tests/processes.md": "evidence/processes.md",
    "tests/reliability.md": "evidence/reliability.md",
    "notebooks/README.md": "notebooks/index.md",
    "notebooks/understanding_qurl.ipynb": "notebooks/understanding.md",
    "notebooks/gsm8k_grpo.ipynb": "notebooks/grpo.md",
    "notebooks/gsm8k_ppo.ipynb": "notebooks/ppo.md",
}
"""Files outside docs/ that become pages of the site."""

EVIDENCE = ("results.md", "upstream.md", "changelog.md")
"""Pages that are searched like those of `evidence/`."""

HELP_MARK = "<!-- Here the site has the help of every subcommand. -->"
HELP_WIDTH = 88
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")  # or an image's, behind its `!`
BADGE = re.compile(r"\[!\[[^\]]*\]\(https:[^)]*\)\]\([^)]*\)")  # an image from elsewhere
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"<code>(?P<text>[^<>]*)</code>")
INLINE = re.compile(r"<code>[^<>\n]*--.*?</code>")
OPTION = re.compile(r"(?<![\w-])--\w")  # a browser may break the line after the dashes
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]* src=\"(?!data:)(?:https?:)?//[^\"]+\""
    r"|<link[^>]* rel=\"(?:stylesheet|icon|preconnect|preload)\"[^>]*//[^>]*>"
)
"""What a page loads from another host."""
QUOTED = re.compile(r'<details class="mkdocstrings-source">.*?</details>', re.DOTALL)
LOG = logging.getLogger("mkdocs.plugins.docs_pages")  # where a warning is an error of `--strict`
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live outside docs/, and the files that pages link to."""
    sources = [source for source in ELSEWHERE if source.endswith(".md")]
    sources += [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    linked: set[str] = set()
    for source in sources:
        linked.update(_linked_files(source))
    for name in sorted(linked):
        files.append(File.generated(config, f"files/{name}.txt", abs_src_path=str(ROOT / name)))
    for source, uri in ELSEWHERE.items():
        path = ROOT / source
        if path.suffix == ".ipynb":
            copy = f"files/{path.name}"
            files.append(File.generated(config, copy, abs_src_path=str(path)))
            first, *others = notebook_page(json.loads(path.read_text(encoding="utf-8"))["cells"])
            # As HTML, because the link is not one of the repository.
            link = f'<a href="../{copy}" download>Download this notebook</a>'
            page = "\n\n".join([first, link, *others])
            files.append(File.generated(config, uri, content=page))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def _linked_files(source: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to and that are not pages."""
    for text in FENCE.split((ROOT / source).read_text(encoding="utf-8"))[::2]:
        for link in LINK.finditer(text):
            path = _path(link["target"].partition("#")[0], source)
            if path and not _page(path) and (ROOT / path).is_file():
                yield path


def _path(target: str, source: str) -> str | None:
    """Return the path in the repository of a link's target.

    It is `None` for other hosts, and for links within the page.
    """
    if not target or re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _page(path: str) -> str | None:
    """Return the site's page, or picture, for a path in the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and path.endswith((".md", ".png", ".svg")):
        return path.removeprefix("docs/")
    return ELSEWHERE.get(path)


def notebook_page(cells: list[dict[str, Any]]) -> list[str]:
    """Return the parts of a notebook as Markdown: its texts, its code, and its stored outputs."""
    parts = []
    for cell in cells:
        source = BADGE.sub("", "".join(cell["source"]))
        if cell["cell_type"] != "markdown":
            source = f"```python\n{source}\n```"
        parts.append(source)
        parts += [_shown(output) for output in cell.get("outputs", [])]
    return parts


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"]).strip()
        return f'<img alt="Figure of the code above" src="data:image/png;base64,{image}">'
    text = "".join(output.get("text", data.get("text/plain", [])))
    return f"```text\n{text.rstrip()}\n```"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links, and insert the help of the command line.

    A search finds guides before evidence.
    """
    uri = page.file.src_uri
    if uri.startswith("evidence/") or uri in EVIDENCE:
        page.meta["search"] = {"boost": 0.5}
    elsewhere = {uri: source for source, uri in ELSEWHERE.items()}
    source = elsewhere.get(uri, f"docs/{uri}")

    def convert(link: re.Match[str]) -> str:
        return _converted(link, source, uri, config.repo_url)

    parts = FENCE.split(markdown)  # every other part is code, which stays unchanged
    parts[::2] = [LINK.sub(convert, text) for text in parts[::2]]
    return "".join(parts).replace(HELP_MARK, command_line_help())


def on_page_content(page_html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show a default factory as its value (`['lm_head']` for `(lambda: ['lm_head'])()`).

    Also mark where long names in tables may break on a narrow screen, keep the dashes of an option
    with its name, and let a picture open in its own size.
    """
    page_html = re.sub(r"\(lambda: ([^()]*)\)\(\)", r"\1", page_html)
    page_html = re.sub(
        r'<img [^>]*src="(?!data:)([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', page_html
    )
    page_html = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), page_html)
    return INLINE.sub(_with_whole_options, page_html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of what a page loads from elsewhere, and of formulas that no hook has drawn."""
    shown = QUOTED.sub("", output)
    for problem in (*LOADED.findall(shown), *re.findall(r"\$\$|arithmatex", shown)):
        LOG.warning("%s has %s", page.file.src_uri, problem)
    return output


def _breakable(code: re.Match[str]) -> str:
    text = re.sub(r"([/_.=])(?=[A-Za-z])", r"\1<wbr>", code["text"])
    return f"<code>{text}</code>"


def _with_whole_options(code: re.Match[str]) -> str:
    return OPTION.sub(r'<span class="option">\g<0></span>', code[0])


def _converted(link: re.Match[str], source: str, uri: str, repo_url: str | None) -> str:
    target, hash_mark, anchor = link["target"].partition("#")
    text = link["text"]
    path = _path(target, source)
    if path is None:
        return link[0]
    page = _page(path)
    if page is None:
        if repo_url:
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path})"
        if not (ROOT / path).exists():
            LOG.warning("%s links to %s, which does not exist", source, path)
        if not (ROOT / path).is_file():  # a folder
            return text if path in text else f"{text} (`{path}`)"
        page = f"files/{path}.txt"
    place = posixpath.relpath(page, posixpath.dirname(uri) or ".")
    return f"[{text}]({place}{hash_mark}{anchor})"


def command_line_help() -> str:
    """A heading and the help of each subcommand.

    `grpo`, `ppo` and `rloo` import TRL for theirs, and are left out.
    """
    names = [name for name, command in COMMANDS.items() if command.adds_help]
    return "\n\n".join(f"### `trl-qurl {name}`\n\n```text\n{_help(name)}```" for name in names)


def _help(command: str) -> str:
    os.environ["COLUMNS"] = str(HELP_WIDTH)
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        build_parser([command]).parse_args([command, "--help"])
    return printed.getvalue()
