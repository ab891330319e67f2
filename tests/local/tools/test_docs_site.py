"""The documentation as a site: its generator warns of nothing; pictures are those of the layouts."""

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


def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's generator is not installed: make venv")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (site / "planning.html").read_text()
    for feature in ("md-footer__link--next", "md-footer__link--prev", 'data-md-color-scheme="slate"', "search.js"):
        assert feature in page
    assert (site / "search/search_index.js").exists() and "unpkg" not in page  # nothing is loaded from elsewhere
    reference = (site / "reference.html").read_text()
    assert "zm.shard" in reference and 'id="zeromesh.sharding.shard"' in reference
