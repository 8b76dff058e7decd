"""Charts over the time of a run as inline SVG: lines and bars of faults, on one common axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float | None]]
"""Seconds and a value; None leaves a gap."""

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 64, 16, 12, 22
_ROW = 20


@dataclass(frozen=True, slots=True)
class Band:
    """A fault: when, and what it is."""

    start: float
    stop: float
    words: str


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that all charts of a report share."""

    seconds: float

    def x(self, at: float) -> float:
        """Return where a second lies."""
        inside = min(max(at, 0.0), self.seconds) / self.seconds
        return _LEFT + inside * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> list[float]:
        """Return some round seconds."""
        step = _round_step(self.seconds / 8)
        return [n * step for n in range(int(self.seconds / step) + 1)]


def fault_chart(axis: Axis, bands: Sequence[Band]) -> str:
    """Draw a row for every fault."""
    height = _TOP + _ROW * max(len(bands), 1) + _BOTTOM
    parts = [_grid(axis, height)]
    for row, band in enumerate(bands):
        y, x = _TOP + row * _ROW, axis.x(band.start)
        width = max(axis.x(band.stop) - x, 3)
        parts.append(
            f'<rect class="fault" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}"/>'
        )
        after = x + width + 6
        inside = after < _WIDTH * 0.75
        place = f'x="{after if inside else x - 6:.1f}" text-anchor="{"start" if inside else "end"}"'
        parts.append(f'<text class="name" {place} y="{y + 14}">{escape(band.words)}</text>')
    return _svg(height, parts, "faults over time")


def line_chart(
    axis: Axis,
    lines: Mapping[str, Points],
    bands: Sequence[Band],
    *,
    unit: str,
    top: float | None = None,
    log: bool = False,
    height: int = 190,
) -> str:
    """Draw lines over time, with the faults behind them; a logarithmic scale where asked for."""
    values = [v for points in lines.values() for _, v in points if v is not None]
    scale = _Scale.over([v for v in values if v > 0] if log else values, top, height, log=log)
    parts = [
        f'<rect class="band" x="{axis.x(b.start):.1f}" y="{_TOP}" '
        f'width="{max(axis.x(b.stop) - axis.x(b.start), 1):.1f}" '
        f'height="{height - _TOP - _BOTTOM}"><title>{escape(b.words)}</title></rect>'
        for b in bands
    ]
    parts.append(_grid(axis, height))
    for value, words in scale.ticks(unit):
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{words}</text>'
        )
    for number, points in enumerate(lines.values()):
        drawn = [(at, None if v is None or (log and v <= 0) else v) for at, v in points]
        parts.append(f'<path class="line c{number % 6}" d="{_path(axis, scale, drawn)}"/>')
    legend = "".join(
        f'<span><i class="c{number % 6}"></i>{escape(name)}</span>'
        for number, name in enumerate(lines)
    )
    return f'<div class="legend">{legend}</div>{_svg(height, parts, ", ".join(lines))}'


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    height: int
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], top: float | None, height: int, *, log: bool) -> _Scale:
        most = max(values, default=1.0) or 1.0
        if not log:
            return cls(0.0, top if top is not None else most * 1.08, height, log)
        low = 10.0 ** math.floor(math.log10(min(values, default=0.1)))
        return cls(low, max(10.0 ** math.ceil(math.log10(most)), low * 10), height, log)

    def y(self, value: float) -> float:
        share = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.log
            else (value - self.low) / (self.high - self.low)
        )
        room = self.height - _TOP - _BOTTOM
        return round(_TOP + room * (1 - min(max(share, 0.0), 1.0)), 1)

    def ticks(self, unit: str) -> list[tuple[float, str]]:
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            found = [10.0**power for power in range(first, last + 1)]
        else:
            step = _round_step(self.high / 4)
            found = [n * step for n in range(int(self.high / step + 1e-9) + 1)]
        return [(value, f"{value:g}{unit}") for value in found]


def _path(axis: Axis, scale: _Scale, points: Points) -> str:
    words, pen = [], "M"
    for at, value in points:
        if value is None:
            pen = "M"
            continue
        words.append(f"{pen}{axis.x(at):.1f} {scale.y(value):.1f}")
        if pen == "M":
            words.append("h2")  # a point alone is seen, too
        pen = "L"
    return "".join(words)


def _grid(axis: Axis, height: int) -> str:
    parts = []
    for at in axis.ticks():
        x, foot = f"{axis.x(at):.1f}", height - _BOTTOM
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{foot}"/>')
        parts.append(
            f'<text class="tick" x="{x}" y="{foot + 15}" text-anchor="middle">{at:g} s</text>'
        )
    return "".join(parts)


def _svg(height: int, parts: Sequence[str], words: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(words)}">'
        f"{''.join(parts)}</svg>"
    )


def _round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below `rough`."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
