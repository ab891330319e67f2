"""Builds the release in dist/, and tries it as a user who has only the release: `make dist`.

1. A copy of the tracked files, whose README has no relative links: outside of the repository they lead nowhere.
2. An sdist, and the wheel from it, each built in an isolated environment; twine's checks of both.
3. The wheel in a new environment (build/dist/venv), outside of the repository: the README's Python, and two commands.
4. The simulated device, compiled from the unpacked sdist.

Nothing is uploaded. To upload: `build/dist/tools/bin/twine upload dist/*`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.check_docs import blocks

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "dist", ROOT / "build" / "dist"
LEFT_OUT = (".ci/", "benchmarks/results/")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)[^)]*\)")
DEVICE = "from zeromesh import simdev; simdev.start(); import torch; print(torch.ones(2, device='simdev').sum().item())"


def run(*command: str | Path, source: Path | None = None) -> None:
    """Runs a command in build/dist; ends the script if the command fails."""
    print("+", *command, flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if source is not None:
        environment |= {"PYTHONPATH": str(source), "TORCH_EXTENSIONS_DIR": str(WORK / "extensions")}
    status = subprocess.run([*map(str, command)], cwd=WORK, env=environment, check=False).returncode
    if status:
        sys.exit(f"make dist: this failed with {status}: {' '.join(map(str, command))}")


def copy_tracked(target: Path) -> None:
    """Copies the tracked files. In the README, relative links and pictures become their text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith(LEFT_OUT):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    readme = target / "README.md"
    readme.write_text(LINK.sub(lambda link: f"*{link[2]}*" if link[1] else link[2], readme.read_text()))


def main() -> None:
    for directory in (DIST, WORK):
        shutil.rmtree(directory, ignore_errors=True)
    copy_tracked(WORK / "source")
    run(sys.executable, "-m", "venv", WORK / "tools")
    run(WORK / "tools" / "bin" / "pip", "install", "--quiet", "build>=1.3,<2", "twine>=6.1,<8")
    run(WORK / "tools" / "bin" / "python", "-m", "build", "--outdir", DIST, WORK / "source")
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(WORK / "tools" / "bin" / "twine", "check", "--strict", wheel, sdist)

    run(ROOT / "tools" / "venv.sh", WORK / "venv", ROOT / "constraints.txt", wheel)
    python = WORK / "venv" / "bin" / "python"
    page = (ROOT / "README.md").read_text()
    shown = [block.text for block in blocks(page) if block.language == "python" and not block.skip_reason]
    run(python, "-W", "error", "-c", "\n".join(shown))
    run(python, "-m", "zeromesh.cli", "env")
    work = ["--world", "64", "--seq-len", "4096", "--global-batch-tokens", "4194304"]
    run(python, "-m", "zeromesh.cli", "plan", "--model", "llama-7b", "--cluster", "a800-8x-hdr", *work)

    with tarfile.open(sdist) as archive:
        archive.extractall(WORK, filter="data")
    run(sys.executable, "-c", DEVICE, source=WORK / sdist.name.removesuffix(".tar.gz") / "src")
    print(f"make dist: {wheel.name} ({wheel.stat().st_size:,} bytes), {sdist.name} ({sdist.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
