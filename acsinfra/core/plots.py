"""Plots as SVG that the server draws: they need no JavaScript, print, and follow the page's colours.

Here is the geometry, in the units of the plot's viewBox; `parts/bars.html` and `parts/line.html` draw it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 220
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 10, 24
SERIES_AT_MOST: Final = 6


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where, and what it says."""

    at: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A bar, or the part of a stacked one that is of the series `series`; `title` is shown when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    series: int
    title: str


@dataclass(frozen=True)
class Point:
    """A point of a line."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Plot:
    """What a template draws. `path` is the line through `points`."""

    bars: tuple[Bar, ...]
    points: tuple[Point, ...]
    path: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def plot_bars(labels: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], *, label_every: int = 1) -> Plot:
    """Stacked bars, one for each of `labels`; a series is its name and a value for each label, none negative."""
    totals = [sum(values[at] for _, values in series) for at in range(len(labels))]
    top = _top(max(totals, default=0))
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    bars = []
    for at, label in enumerate(labels):
        below = 0.0
        for number, (name, values) in enumerate(series):
            value = values[at]
            if value <= 0:
                continue
            low, high = _y(below, top), _y(below + value, top)
            title = f"{label}: {format_count(value)}" + (f" ({name})" if name else "")
            bars.append(
                Bar(_short(LEFT + slot * (at + 0.12)), high, _short(slot * 0.76), _short(low - high), number, title)
            )
            below += value
    ticks = tuple(
        Tick(_short(LEFT + slot * (at + 0.5)), label) for at, label in enumerate(labels) if at % label_every == 0
    )
    return Plot(tuple(bars), (), "", ticks, _y_ticks(top))


def plot_line(xs: Sequence[int], ys: Sequence[float], *, x_name: str) -> Plot:
    """A line through (xs, ys), xs ascending and ys not negative."""
    top = _top(max(ys, default=0))
    first, last = (xs[0], xs[-1]) if xs else (0, 0)
    span = max(1, last - first)
    usable = WIDTH - LEFT - RIGHT - 16
    places = [_short(LEFT + 8 + usable * ((x - first) / span if last > first else 0.5)) for x in xs]
    points = tuple(
        Point(place, _y(y, top), f"{x_name} {x}: {y:.4g}") for place, x, y in zip(places, xs, ys, strict=True)
    )
    path = "M" + "L".join(f"{point.x} {point.y}" for point in points) if points else ""
    every = max(1, math.ceil(len(xs) / 12))
    ticks = tuple(Tick(place, str(x)) for at, (place, x) in enumerate(zip(places, xs, strict=True)) if at % every == 0)
    return Plot((), points, path, ticks, _y_ticks(top))


def format_count(value: float) -> str:
    """`1,234`; of a fraction its first digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def format_short(value: float) -> str:
    """`1.2M`: for an axis."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _top(highest: float) -> float:
    """The end of the axis: 1, 2, 4, 6 or 8 times a power of ten, whose quarters are short numbers."""
    if not highest > 0 or not math.isfinite(highest):
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= highest * 0.999999)


def _y_ticks(top: float) -> tuple[Tick, ...]:
    return tuple(Tick(_y(top * part / 4, top), format_short(top * part / 4)) for part in range(5))


def _y(value: float, top: float) -> float:
    usable = HEIGHT - TOP - BOTTOM
    return _short(HEIGHT - BOTTOM - usable * min(value, top) / top)


def _short(number: float) -> float:
    return round(number, 2)
