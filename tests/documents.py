"""Reads the repository's Markdown for tests/test_documentation.py: code, commands, links, headings, names."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted({*ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/*.md")} - {ROOT / "benchmarks" / "README.md"}),
    *SITE,
]

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?:    \S.*\n)+")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?)\s*$", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    """A block of code in a page."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 1, language, found["code"])
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def all_blocks(language: str) -> list[Block]:
    """Of all pages."""
    return [block for page in PAGES for block in blocks(page, language)]


def prose(page: Path) -> str:
    """A page without its fenced and indented blocks."""
    return INDENTED.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def inline_code(page: Path) -> list[str]:
    """The text between backticks, in paragraphs and tables."""
    return INLINE.findall(prose(page).replace("\\|", "|"))


def links(page: Path) -> list[str]:
    """Targets of a page's links, except those to other hosts."""
    return [target for target in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """A page's headings as GitHub names them in links."""
    slugs: set[str] = set()
    for heading in HEADING.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        title = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading["title"]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = 0
        while (unique := slug if not number else f"{slug}-{number}") in slugs:
            number += 1
        slugs.add(unique)
    return slugs


def rows(page: Path, section: str = "") -> Iterator[list[str]]:
    """The cells of every row of the tables on a page, or in a section (`## ...`) of it, without heads and rules."""
    text = prose(page)
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = text.splitlines()
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if line.startswith("|") and not line.startswith("|--") and not below.startswith("|--"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block, as the programs get them."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    found.append(words)
                words = []
            else:
                words.append(word)
    return found


def shell_commands() -> list[tuple[str, list[str]]]:
    """Every command of every `bash` block and every indented block of all pages, and where it is."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            found += [(str(block), words) for words in commands(block.code)]
        for indented in INDENTED.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if re.match(r" +(python|make|trl-qurl|pip|git) ", indented):
                place = str(page.relative_to(ROOT))
                found += [(place, words) for words in commands(re.sub(r"^    ", "", indented, flags=re.MULTILINE))]
    return found
