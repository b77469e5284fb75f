"""The site: it builds without a warning, needs nothing from elsewhere, and its reference has every public name."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from documents import ROOT
from public_names import public_names

pytestmark = [
    pytest.mark.xdist_group("site"),  # it is built once
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("matplotlib", "mkdocs", "mkdocstrings")),
        reason="needs matplotlib, mkdocs and mkdocstrings (trl-qurl[docs])",
    ),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


def read(page: Path) -> str:
    """A page without the source code it quotes."""
    return re.sub(r'<details class="mkdocstrings-source">.*?</details>', "", page.read_text(), flags=re.DOTALL)


def inventory(site: Path) -> set[str]:
    """All names that the reference has an entry for."""
    content = (site / "objects.inv").read_bytes()
    listed = zlib.decompress(content[content.index(b"zlib.\n") + len(b"zlib.\n") :]).decode()
    return {line.split()[0] for line in listed.splitlines()}


def homes(module: str, name: str) -> set[str]:
    """The ways in which a name may stand in the reference: where it is exported, and where it is defined."""
    thing = getattr(importlib.import_module(module), name)
    return {f"{module}.{name}", f"{getattr(thing, '__module__', module)}.{name}"}


def named(path: str) -> object:
    """What stands under a name, which may have several."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_in_the_reference(site):
    listed, public = inventory(site), public_names()
    assert len(public) > 50
    assert [f"{module}.{name}" for module, name in public if not homes(module, name) & listed] == []


def test_the_table_of_names_has_every_one_of_them_with_a_line_and_a_link(site):
    html = read(site / "reference.html").replace("<wbr>", "")
    rows = re.findall(r'<tr>\s*<td><a[^>]* href="([^"]+)"><code>([^<]+)</code></a></td>\s*<td>(.+?)</td>', html)
    listed = {id(named(name)) for _, name, _ in rows}
    missing = [f"{module}.{name}" for module, name in public_names() if id(named(f"{module}.{name}")) not in listed]
    assert missing == ["trl_qurl.__version__", "trl_qurl.quiet"]  # they stand above the table
    for link, name, line in rows:
        assert f'id="{link.removeprefix("#")}"' in html, name
        assert len(line) > 10, name


def test_nothing_comes_from_elsewhere(site):
    for page in site.rglob("*.html"):
        html = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"([^\"]+)\"", html)
        loaded += re.findall(r"<link[^>]* rel=\"(?:stylesheet|icon|preconnect|preload)\"[^>]*>", html)
        assert loaded and not [address for address in loaded if "//" in address], page.name
        assert "@import url" not in html


def test_pictures_are_there(site):
    shown = 0
    for page in site.rglob("*.html"):
        for source in re.findall(r"<img[^>]* src=\"([^\"]+)\"", page.read_text()):
            assert (page.parent / source).exists(), f"{source} in {page.name}"
            shown += 1
    assert shown >= 3


def test_formulas_are_drawn(site):
    pages = {page.relative_to(site).as_posix(): read(page) for page in site.rglob("*.html")}
    assert pages["reference.html"].count('class="formula"') >= 2
    for name, html in pages.items():
        assert "$$" not in html and "arithmatex" not in html, name


def test_settings_of_a_configuration_are_a_list_and_not_code(site):
    html = read(site / "reference.html")
    for field in (
        "rollout_quantization",
        "weight_sync",
        "objective",
        "sync_check_interval",
        "critic_warmup_steps",
    ):
        assert re.search(rf"<b>{field}</b>|<code>{field}</code>", html), field
    assert "*optional*" not in html and "&gt; Weight sync" not in html


def test_fields_that_comments_describe_are_on_the_site(site):
    assert "istance of the lower clip bound below 1" in read(site / "reference.html")


def test_the_help_of_every_subcommand_is_on_the_site(site):
    html = (site / "reference.html").read_text()
    for option in ("--no-such-option", "--completion-len", "--schemes", "--required-rise", "--port"):
        assert (option in html) == (option != "--no-such-option"), option
