"""Rewards by training step as an SVG: a line for every run, and dots for held-out strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WIDE, _HIGH = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 628, 16, 264
_LOWEST = 0.5
_COLOURS = ("#c2571a", "#1b6fd0", "#3b8f4e", "#8a93a0")


def draw_reward_curves(cells: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of the training reward of every step and the held-out reward, with a colour for each α."""
    cells = [cell for cell in cells if cell.get("reward")]
    most = max((len(cell["reward"]) for cell in cells), default=1)
    alphas = sorted({cell["alpha"] for cell in cells})
    colour = {alpha: _COLOURS[number % len(_COLOURS)] for number, alpha in enumerate(alphas)}

    def place(step: float, reward: float) -> tuple[float, float]:
        share = (reward - _LOWEST) / (1 - _LOWEST)
        return _LEFT + step / most * (_RIGHT - _LEFT), _BOTTOM - share * (_BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}"',
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tenth in range(5, 11):
        _, y = place(0, tenth / 10)
        parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for step in range(0, most + 1, 5):
        x, _ = place(step, 0)
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{step}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HIGH - 4}" text-anchor="middle">training step</text>')
    for cell in cells:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in enumerate(cell["reward"], start=1)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour[cell["alpha"]]}" stroke-width="1.2"/>')
        dots = [place(*point) for point in cell["held_out"]]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour[cell["alpha"]]}"/>' for x, y in dots]
    for number, alpha in enumerate(alphas):
        y = _BOTTOM - 16 * (len(alphas) - number)
        said = f"α = {alpha:g}: training reward; dots: held out"
        parts.append(f'<text x="{_RIGHT - 240}" y="{y}" fill="{colour[alpha]}">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
