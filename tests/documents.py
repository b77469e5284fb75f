"""Reads the repository's Markdown for the tests: code, commands, links, headings, names."""

import re
import shlex
import textwrap
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted({*ROOT.glob("*/README.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/*.md")}),
    *SITE,
]

CODE = re.compile(
    r"^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?:    \S[^\n]*\n)+)",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of code in a page."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page, language):
    """The fenced blocks in a language, or the `indented` blocks."""
    text = page.read_text(encoding="utf-8")
    for match in CODE.finditer(text):
        found = "indented" if match["indented"] else match["language"]
        if found == language:
            line = text[: match.start()].count("\n") + 1
            code = textwrap.dedent(match["fenced"] or match["indented"])
            yield Block(page, line, language, code)


def all_blocks(language):
    """The blocks of all pages."""
    found = []
    for page in PAGES:
        found += blocks(page, language)
    return found


def new_side(diff):
    """What a diff makes of its file."""
    lines = [line[1:] for line in diff.code.splitlines() if not line.startswith("-")]
    return diff._replace(code="\n".join(lines))


def prose(page):
    """A page without its blocks of code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page):
    """The text between backticks, in paragraphs and tables."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page).replace("\\|", "|"))


def links(page):
    """Targets of a page's links and images, except those on other hosts."""
    return re.findall(r"\[[^\]]*\]\((?![a-z]+:)([^)\s]+)\)", prose(page))


def anchors(page):
    """A page's headings as GitHub names them in links."""
    names = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", title.lower())
        names.add(name.replace(" ", "-"))
    return names


def rows(page, section=""):
    """The cells of every row of the tables on a page, or in a section (`## ...`) of it, without
    heads and rules.
    """
    text = prose(page)
    if section:
        _, text = text.split(f"\n## {section}\n")
        text, *_ = text.split("\n## ")
    for line, below in pairwise([*text.splitlines(), ""]):
        is_head_or_rule = line.startswith("|--") or below.startswith("|--")
        if line.startswith("|") and not is_head_or_rule:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            yield [cell.strip() for cell in cells]


def commands(text):
    """The words of each command of a shell block, as the programs get them."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        for is_separator, words in groupby(lexer, key=lambda word: set(word) <= set(";&|")):
            if not is_separator:
                yield list(words)


def shell_commands():
    """Every command of every `bash` block and indented block of all pages, and where it is."""
    found = []
    for block in all_blocks("bash") + all_blocks("indented"):
        if block.language == "bash" or re.match("(python|make|trl-qurl|pip|git) ", block.code):
            found += [(str(block), words) for words in commands(block.code)]
    return found


def extension_examples():
    """The Python examples of docs/architecture.md, by what they add."""
    names = "scheme registration objective distillation config trainer check transform"
    examples = [block.code for block in blocks(ROOT / "docs" / "architecture.md", "py")]
    return dict(zip(names.split(), examples, strict=True))
