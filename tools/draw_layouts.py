"""Draws the parts of a model that each rank holds under a strategy: docs/pictures/*.svg, from the layout itself.

Usage: tools/draw_layouts.py        rewrites the pictures
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import product
from pathlib import Path

from zeromesh.strategy import Layout

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
DRAWN = {
    "ddp": "node=0,cluster=0",
    "fsdp": "node=3,cluster=3",
    "hsdp": "node=3,cluster=0",
    "node3-cluster1": "node=3,cluster=1",
    "zeropp": "node=3,cluster=3k",
}
AXES = (("node", 4), ("cluster", 2))
NUMEL = 4096
WIDTH, HEIGHT, GAP, LABEL = 84, 16, 10, 132
COLOURS = {"parameters": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b"}


def draw(strategy: str) -> str:
    """Returns an SVG: a rank's bars for parameters, gradients and optimizer states are filled where it holds them."""
    layout = Layout.of(strategy, AXES)
    kinds = {
        "parameters": layout.param_axes,
        "gradients": layout.grad_axes,
        "optimizer": layout.significant,
    }
    ranks = list(product(range(AXES[1][1]), range(AXES[0][1])))
    width = LABEL + len(ranks) * (WIDTH + GAP) + GAP * AXES[1][1]
    height = 52 + len(kinds) * (HEIGHT + GAP)
    parts: list[str] = []
    for index, (cluster, node) in enumerate(ranks):
        x = LABEL + index * (WIDTH + GAP) + cluster * GAP
        parts += _text(x + WIDTH / 2, 40, f"GPU {node}", anchor="middle")
        for row, (kind, axes) in enumerate(kinds.items()):
            y = 50 + row * (HEIGHT + GAP)
            held = layout.shard(NUMEL, axes, {"node": node, "cluster": cluster})
            first, last = (WIDTH * bound / NUMEL for bound in (held.start, held.stop))
            parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#8882" stroke="#8886"/>')
            parts.append(
                f'<rect x="{x + first:g}" y="{y}" width="{last - first:g}" height="{HEIGHT}" fill="{COLOURS[kind]}"/>'
            )
    parts += _text(4, 18, strategy)
    for cluster in range(AXES[1][1]):
        x = LABEL + cluster * (AXES[0][1] * (WIDTH + GAP) + GAP)
        parts += _text(x + AXES[0][1] * (WIDTH + GAP) / 2, 18, f"node {cluster}", anchor="middle")
    for row, kind in enumerate(kinds):
        parts += _text(4, 50 + row * (HEIGHT + GAP) + HEIGHT - 4, kind)
    title = f"{escape(strategy)}: what each of 8 GPUs in 2 nodes holds"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" '
        f'font-size="13" fill="#777">\n<title>{title}</title>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> Iterator[str]:
    yield f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, strategy in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw(strategy))


if __name__ == "__main__":
    main()
