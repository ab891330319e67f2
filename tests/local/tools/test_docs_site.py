"""The documentation as a site: it is built whole; pictures are those of the layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.draw_layouts import DRAWN, PICTURES, draw

ROOT = Path(__file__).resolve().parents[3]


def test_pictures_are_drawn_from_the_layouts() -> None:
    assert {path.name for path in PICTURES.glob("*.svg")} == {f"{name}.svg" for name in DRAWN}
    for name, strategy in DRAWN.items():
        assert (PICTURES / f"{name}.svg").read_text() == draw(strategy), "run tools/draw_layouts.py"


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's generator is not installed: make venv")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (site / "planning.html").read_text()
    assert "md-footer__link--next" in page and "search.js" in page and (site / "search/search_index.js").exists()
    assert "unpkg" not in page  # nothing is loaded from elsewhere
    assert 'src="readme/levels.svg"' in (site / "index.html").read_text() and (site / "readme/levels.svg").exists()
    assert len(list(site.rglob("*.html"))) > 40
    reference = (site / "reference.html").read_text()
    assert "zm.shard" in reference and 'id="zeromesh.sharding.shard"' in reference
