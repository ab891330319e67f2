"""The documentation as a site: every page opens in a browser, whole; pictures are those of the layouts."""

from __future__ import annotations

import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.draw_layouts import DRAWN, PICTURES, draw

ROOT = Path(__file__).resolve().parents[3]

DRIVER = """<!doctype html><body><script>
const pages = %s, found = {};
function next(index) {
  if (index === pages.length) {
    fetch("/found", { method: "POST", body: JSON.stringify(found) });
    return;
  }
  const frame = document.createElement("iframe"), errors = [];
  frame.width = 1200;
  frame.onload = () => {
    const page = frame.contentDocument;
    page.querySelectorAll("img").forEach(image => image.naturalWidth || errors.push("no image " + image.src));
    const heading = page.querySelector("h1");
    found[pages[index]] = { heading: heading ? heading.innerText : "", text: page.body.innerText.length, errors };
    frame.remove();
    next(index + 1);
  };
  frame.src = pages[index];
  document.body.append(frame);
  frame.contentWindow.addEventListener("error", event => errors.push(event.message));
}
next(0);
</script>"""


def test_pictures_are_drawn_from_the_layouts() -> None:
    assert {path.name for path in PICTURES.glob("*.svg")} == {f"{name}.svg" for name in DRAWN}
    for name, strategy in DRAWN.items():
        assert (PICTURES / f"{name}.svg").read_text() == draw(strategy), "run tools/draw_layouts.py"


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """The address of a server of the directory, and the posts to it."""
    posted: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    handler = functools.partial(Handler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def test_every_page_opens_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's generator is not installed: make venv")
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (site / "planning.html").read_text()
    for feature in ("md-footer__link--next", "md-footer__link--prev", 'data-md-color-scheme="slate"', "search.js"):
        assert feature in page
    assert 'src="readme/levels.svg"' in (site / "index.html").read_text() and (site / "readme/levels.svg").exists()
    assert (site / "search/search_index.js").exists() and "unpkg" not in page  # nothing is loaded from elsewhere
    if browser is None:
        pytest.skip("no browser here: the site was built and its links followed, and not opened")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    (site / "driver.html").write_text(DRIVER % json.dumps(pages))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    with served(site) as (address, posted):
        opened = subprocess.Popen([browser, *options, f"{address}/driver.html"], stderr=subprocess.DEVNULL)
        try:
            found = posted.get(timeout=120)
        finally:
            opened.kill()
            opened.wait()
    assert len(found) > 40 and list(found) == pages
    asked = ["--virtual-time-budget=20000", "--dump-dom", f"{(site / 'planning.html').as_uri()}?q=HO-Ring"]
    dom = subprocess.run([browser, *options, *asked], capture_output=True, text=True, check=True).stdout
    assert dom.count('class="md-search-result__item"') > 2  # in a page that is opened as a file
    empty = [page for page, seen in found.items() if not seen["heading"] or seen["text"] < 300]
    assert not empty and not [(page, seen["errors"]) for page, seen in found.items() if seen["errors"]]
    reference = (site / "reference.html").read_text()
    assert "zm.shard" in reference and 'id="zeromesh.sharding.shard"' in reference
