"""The site builds without a warning and without external files, and its reference has every public
name.
"""

import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from public_names import public_names

from trl_qurl.cli import COMMANDS

pytestmark = [
    pytest.mark.xdist_group("site"),  # built once
    pytest.mark.skipif(
        any(
            importlib.util.find_spec(name) is None
            for name in ("matplotlib", "mkdocs", "mkdocstrings")
        ),
        reason="needs matplotlib, mkdocs and mkdocstrings (trl-qurl[docs])",
    ),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


def read(page: Path) -> str:
    """A page without the source code it quotes."""
    return re.sub(
        r'<details class="mkdocstrings-source">.*?</details>', "", page.read_text(), flags=re.DOTALL
    )


def test_every_public_name_is_in_the_reference(site):
    html = read(site / "reference.html").replace("<wbr>", "")
    table = re.findall(
        r'<tr>\s*<td><a[^>]* href="#([^"]+)"><code>([^<]+)</code></a></td>\s*<td>.{11,}?</td>', html
    )
    listed = {id(pkgutil.resolve_name(name)) for _, name in table}
    public = [
        (f"{module}.{name}", id(pkgutil.resolve_name(f"{module}:{name}")))
        for module, name in public_names()
    ]
    above_the_table = ["trl_qurl.__version__", "trl_qurl.quiet"]
    assert [name for name, identity in public if identity not in listed] == above_the_table
    assert all(
        f'id="{anchor}"' in html for anchor in [*above_the_table, *(anchor for anchor, _ in table)]
    )


def test_the_reference_shows_docstrings_and_help(site):
    html = read(site / "reference.html")
    for field in ("weight_sync", "mismatch_guard", "critic_warmup_steps"):
        assert f"<b><code>{field}</code></b>" in html, field
    assert ", factor on each token" in html  # from the comment behind a field
    for name, command in COMMANDS.items():
        assert not command.adds_help or f"usage: trl-qurl {name} [-h]" in html, name


def test_pages_load_no_external_files_and_show_formulas(site):
    formulas = 0
    for page in site.rglob("*.html"):
        html = read(page)
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"([^\"]+)\"", html)
        loaded += re.findall(
            r"<link[^>]* rel=\"(?:stylesheet|icon|preconnect|preload)\"[^>]*>", html
        )
        assert loaded and not [
            item for item in loaded if "//" in item and not item.startswith("data:")
        ], page.name
        assert "@import url" not in html
        assert "$$" not in html and "arithmatex" not in html, page.name
        formulas += html.count('class="formula"')
    assert formulas > 2


def test_notebooks_and_evidence_are_pages(site):
    """Where the repository has no address yet, a link to one of its other files leads to a copy."""
    assert not re.search(r"\n      - .+: .+\.md", (ROOT / "mkdocs.yml").read_text()), (
        "a page has two titles"
    )
    assert 'href="files/examples/slurm.sh.txt"' in read(site / "scaling.html")
    assert (site / "files" / "examples" / "slurm.sh.txt").read_text().startswith("#!")
    assert 'href="notebooks/understanding.html"' in read(site / "index.html")
    assert re.search(r'href="evidence/(speed|benchmarks)\.html', read(site / "performance.html"))
    notebook = read(site / "notebooks" / "understanding.html")
    assert notebook.count('src="data:image/png;base64,') >= 3  # its stored figures
    assert "from trl_qurl" in re.sub(r"<[^>]+>", "", notebook)
    assert 'href="../files/understanding_qurl.ipynb"' in notebook
    assert (site / "files" / "understanding_qurl.ipynb").read_text().startswith("{")
    # opens in its own size
    assert re.search(r'<a href="images/real-model.png">\s*<img', read(site / "results.html"))
