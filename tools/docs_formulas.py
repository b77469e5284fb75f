r"""Hook of mkdocs: formulas in LaTeX become drawings in the page.

They stand between `$$` in a docstring or page, and between `$` in a line.

matplotlib draws them when the site is built, so the site needs neither the network nor a script, as
it would with MathJax or KaTeX. There are a dozen formulas, and matplotlib understands all of their
LaTeX except a few spellings. The LaTeX is the label of the drawing, for screen readers.
"""

import html
import re
import zlib
from functools import lru_cache
from io import StringIO

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(
    r'<(?P<tag>div|span) class="arithmatex">\\[\[(](?P<latex>.*?)\\[\])]</(?P=tag)>',
    re.DOTALL,
)
SPELLINGS = {
    r"\lVert": r"\Vert",
    r"\rVert": r"\Vert",
    r"\Big(": r"\left(",
    r"\Big)": r"\right)",
    r"\le ": r"\leq ",
    r"\ge ": r"\geq ",
}
"""LaTeX that matplotlib spells differently."""

POINTS = 11
"""Size of the letters before the page scales them."""


def on_page_content(page_html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace every formula of a page."""
    return FORMULA.sub(_drawing, page_html)


def _drawing(formula: re.Match[str]) -> str:
    latex = " ".join(html.unescape(formula["latex"]).split())
    tag = formula["tag"]
    if tag == "div":  # on its own line, with room for fractions
        latex = latex.replace(r"\frac", r"\dfrac")
    return (
        f'<{tag} class="formula" role="img" aria-label="{html.escape(latex)}">{draw(latex)}</{tag}>'
    )


@lru_cache
def draw(latex: str) -> str:
    """A formula as an SVG element with the color and size of the surrounding text.

    Raises:
        ValueError: If matplotlib cannot read it; the message contains the formula.
    """
    for theirs, ours in SPELLINGS.items():
        latex = latex.replace(theirs, ours)
    font = FontProperties(size=POINTS, math_fontfamily="stix")
    try:
        width, height, depth, _, _ = MathTextParser("path").parse(f"${latex}$", dpi=72, prop=font)
    except ValueError as error:
        raise ValueError(f"The formula {latex} cannot be drawn: {error}") from error
    # A figure of exactly this size.
    figure = Figure(figsize=(width / 72, height / 72))
    figure.text(0, depth / height, f"${latex}$", fontproperties=font, color="#123456")
    written = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": latex, "svg.fonttype": "path"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    _, start, rest = written.getvalue().partition("<svg")
    svg = (start + rest).replace("#123456", "currentColor")
    # Its style sheet would apply to the whole page.
    svg = re.sub(r"<(metadata|style)[ >].*?</\1>", "", svg, flags=re.DOTALL)
    size = f'style="width:{width / POINTS:.3f}em;vertical-align:{-depth / POINTS:.3f}em"'
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf"\1 {size}", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Names must be unique within a page.
    name = f"f{zlib.crc32(latex.encode())}"
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    return re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
