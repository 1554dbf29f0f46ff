"""Parts of pages: episodes as blocks by author and role, and curves as pictures (PNG data URIs, light and dark)."""

from __future__ import annotations

import base64
import io
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from afm.agents import AgentSpec
from afm.errors import MissingExtraError
from afm.palette import PALETTE, ROLE_HUES
from afm.runs.atomic import replacing
from afm.terminal import plural as plural
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, split

COLOURS = len(ROLE_HUES)
"""Number of colours for roles. An agent with more roles starts again with the first colour."""

_MAX_CHARS = 20_000


def template(name: str, **filters: Callable[..., Any]) -> Any:
    """Return a template of ``templates/``. Values are escaped in HTML and in Markdown."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("afm.evaluation"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **({"finalize": in_markdown} if ".md." in name else {"autoescape": True}),
    )
    environment.filters |= filters
    environment.globals |= {"palette": PALETTE, "hues": ROLE_HUES}
    return environment.get_template(name)


class InMarkdown(str):
    """Text that is Markdown already, such as an address whose special characters are encoded."""


def in_markdown(value: Any) -> str:
    """Escape a text so that Markdown shows it unchanged, on one line."""
    if isinstance(value, InMarkdown):
        return value
    flat = " ".join(str(value).split())
    return re.sub(r"([\\`*_{}\[\]<>#|~$!])", r"\\\1", flat.replace("&", "&amp;"))


def write_page(path: Path, text: str) -> None:
    """Replace a file. Lone surrogates, which a model may write and UTF-8 cannot hold, become question marks."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of text by one author in one role.

    Attributes:
        role: Empty for text outside every role.
        text: The text without surrounding white space, and without the middle if it is very long.
        colour: Number of the colour of the role. ``None`` for the environment and for text without a role.
        code: Whether to show it in a fixed-width font.
        fault: The fault in a few words, empty without one.
    """

    role: str
    author: Author
    text: str
    colour: int | None = None
    code: bool = False
    fault: str = ""


def role_colours(spec: AgentSpec) -> dict[str, int]:
    """Return the colour number of each role that the agent may write, in the order of the declaration."""
    own = [role for role in spec.roles if role != spec.observation_role]
    return {role: number % COLOURS for number, role in enumerate(own)}


def blocks_of(record: Record, spec: AgentSpec | None) -> list[Block]:
    """Return the response as blocks in reading order. Without a spec each segment is a block."""
    if spec is None:
        return [Block("", part.author, shortened(part.text)) for part in record.segments if part.text.strip()]
    return list(_by_role(record, spec))


def _by_role(record: Record, spec: AgentSpec) -> Iterator[Block]:
    authors = _Authors(record)
    parsed = split(record.text, spec)
    for step in parsed.steps:
        yield from _loose(step.prefix, authors.at(step.start - len(step.prefix)))
        author = authors.at(step.content_start)
        yield _block(step.role, author, step.content, spec)
    begin = len(record.text) - len(parsed.tail)
    yield from _loose(record.text[begin : parsed.open_start], authors.at(begin))
    if parsed.open_role is not None:
        content = record.text[parsed.open_start + len(parsed.open_role) + 2 :]
        author = authors.at(parsed.open_start)
        yield _block(parsed.open_role, author, content, spec, "never closed")


def _block(role: str, author: Author, content: str, spec: AgentSpec, fault: str = "") -> Block:
    agents = author is Author.AGENT
    if agents and role == spec.observation_role:
        fault = "written by the agent itself"
    colour = role_colours(spec).get(role) if agents else None
    code = not agents or role in spec.tool_roles
    return Block(role, author, shortened(content), colour, code, fault)


def _loose(text: str, author: Author) -> Iterator[Block]:
    if text.strip():
        yield Block("", author, shortened(text), fault="outside every role")


def shortened(text: str) -> str:
    """Return ``text`` without surrounding white space, and without its middle if it is longer than a page shows."""
    text = text.strip()
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half:,} characters left out ...]\n\n{text[-half:]}"


class _Authors:
    """Author of the character at an offset."""

    def __init__(self, record: Record) -> None:
        parts = [part for part in record.segments if part.text]
        self._authors = [part.author for part in parts]
        self._starts = list(accumulate((len(part.text) for part in parts), initial=0))[:-1]

    def at(self, offset: int) -> Author:
        if not self._authors:
            return Author.AGENT
        return self._authors[max(0, bisect_right(self._starts, offset) - 1)]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a curve: finite numbers. ``x`` and ``y`` have the same length.

    Attributes:
        low, high: Ends of an interval around each ``y``, drawn as a band, or as bars for points. Empty without intervals.
        points: Whether to draw points without a line.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    points: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """One picture. The vertical axis includes zero, unless it is logarithmic.

    Attributes:
        x_label, y_label: Labels of the axes, with the unit.
        y_share: Whether values are shares. The axis is then in percent, to 100 % or to the larger of ``y_reach`` and the values.
        y_log: Whether the vertical axis is logarithmic. Every value must be above 0.
        y_reach: Least end of the vertical axis.
        x_from_zero: Whether the horizontal axis includes zero.
        stepped: Whether a value holds until the next one.
        x_whole: Whether the horizontal axis has ticks at whole numbers only.
    """

    title: str
    x_label: str
    series: tuple[Series, ...]
    caption: str = ""
    y_label: str = ""
    y_share: bool = False
    y_log: bool = False
    y_reach: float = 0.0
    x_from_zero: bool = False
    stepped: bool = False
    x_whole: bool = True


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """A drawn curve: ``data:`` URIs for a light and a dark page, and a description (``alt``)."""

    title: str
    caption: str
    light: str
    dark: str
    alt: str


@dataclass(frozen=True, slots=True)
class _Theme:
    text: str
    grid: str
    lines: tuple[str, ...]


_SERIES = tuple(colour for name, colour in PALETTE.items() if name.startswith("series-"))
_LIGHT = _Theme(PALETTE["soft"].light, PALETTE["line"].light, tuple(colour.light for colour in _SERIES))
_DARK = _Theme(PALETTE["soft"].dark, PALETTE["line"].dark, tuple(colour.dark for colour in _SERIES))
_SIZE_INCHES = (4.2, 2.6)
_DPI = 200
_SMOOTH_FROM = 60
_TICKS = [1, 2, 2.5, 5, 10]
"""Distances between ticks, times a power of ten."""


def draw(curve: Curve) -> DrawnCurve:
    """Draw ``curve`` for both themes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    spans = [span for line in curve.series if (span := _smoothing_span(line))]
    note = (
        f" Faint: the logged values. Strong: their mean over {max(spans)} neighbouring points."
        if spans
        else ""
    )
    alt = f"{curve.title}: {_words(curve)}"
    return DrawnCurve(curve.title, f"{curve.caption}{note}", _png(curve, _LIGHT), _png(curve, _DARK), alt)


def _words(curve: Curve) -> str:
    parts = []
    for line in curve.series:
        if line.x:
            first, last = f"{line.y[0]:.3g} at {line.x[0]:g}", f"{line.y[-1]:.3g} at {line.x[-1]:g}"
            parts.append(f"{line.label} from {first} to {last}")
    return "; ".join(parts) or "no values"


def _png(curve: Curve, theme: _Theme) -> str:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError:
        raise MissingExtraError("matplotlib", "eval") from None
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for number, line in enumerate(curve.series):
        _plot(axes, line, theme.lines[number % len(theme.lines)], stepped=curve.stepped)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=curve.x_whole, steps=_TICKS))
    if not curve.x_whole:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _scale(axes, curve)
    _dress(axes, curve, theme)
    buffer = io.BytesIO()
    # No metadata: the same curve gives the same bytes.
    figure.savefig(buffer, format="png", dpi=_DPI, transparent=True, metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _plot(axes: Any, line: Series, colour: str, *, stepped: bool) -> None:
    """Draw a short series with its points, a long one faint behind its running mean, points with their bars."""
    if stepped:
        axes.step(line.x, line.y, where="post", linewidth=1.9, color=colour, label=line.label)
        return
    if line.points:
        ends = zip(line.y, line.low or line.y, line.high or line.y, strict=True)
        reach = [(max(0.0, y - low), max(0.0, high - y)) for y, low, high in ends]
        bars = ([low for low, _ in reach], [high for _, high in reach])
        style = {"fmt": "o", "markersize": 6, "capsize": 3, "clip_on": False}
        axes.errorbar(line.x, line.y, yerr=bars, color=colour, label=line.label, **style)
        return
    # Points at 0 % and 100 % are not cut off at the axis.
    style = {"color": colour, "markersize": 3.2, "clip_on": False}
    if line.low:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
        axes.plot(line.x, line.y, linewidth=1.9, marker="o", label=line.label, **style)
    elif span := _smoothing_span(line):
        axes.plot(line.x, line.y, alpha=0.28, linewidth=1, **style)
        axes.plot(line.x, _smoothed(line.y, span // 2), linewidth=2, label=line.label, **style)
    else:
        marker = "o" if len(line.x) <= 40 else ""
        axes.plot(line.x, line.y, linewidth=1.9, marker=marker, label=line.label, **style)


def _scale(axes: Any, curve: Curve) -> None:
    """Set limits and ticks so that small changes look small: a zero, or whole decades of a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

    values = [value for line in curve.series for value in (*line.y, *line.low, *line.high)] or [1.0]
    if curve.x_from_zero:
        axes.set_xlim(0, 1.05 * max(x for line in curve.series for x in line.x))
    if curve.y_log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        axes.set_yscale("log")
        axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high - low > 1 else (1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=_TICKS))
    if curve.y_share and not curve.y_reach:
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        return
    top = max(0.0, curve.y_reach, *values)
    axes.set_ylim(1.05 * min(0.0, *values), 1.05 * top or None)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:g} %" if curve.y_share else _tick(value))
    )


def _tick(value: float) -> str:
    """``1,500``, ``0.00025`` and ``0``, without a power of ten."""
    text = f"{value:,.7f}".rstrip("0").rstrip(".").replace("-", "−")
    return "0" if text == "−0" else text


def _dress(axes: Any, curve: Curve, theme: _Theme) -> None:
    axes.set_xlabel(curve.x_label, color=theme.text, fontsize=10)
    axes.set_ylabel(curve.y_label, color=theme.text, fontsize=10)
    axes.tick_params(colors=theme.text, labelsize=10, length=0)
    axes.tick_params(axis="x", pad=7)  # the first label stays clear of the vertical axis's lowest
    axes.grid(axis="y", color=theme.grid, linewidth=1)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)
    if len(curve.series) > 1:  # above the picture, where it hides no line
        lengths = sorted((len(line.label) for line in curve.series), reverse=True)
        options = {
            "frameon": False,
            "labelcolor": theme.text,
            "fontsize": 10,
            "ncols": next(n for n in (3, 2, 1) if n == 1 or sum(lengths[:n]) <= 50 - 6 * n),
            "columnspacing": 1.2,
        }
        axes.figure.legend(loc="outside upper left", handlelength=1.4, **options)


def _smoothing_span(line: Series) -> int:
    """Return the number of neighbouring points to smooth over: about a twentieth of a long line, 0 for others."""
    short = line.points or line.low or len(line.y) < _SMOOTH_FROM
    return 0 if short else 2 * max(1, len(line.y) // 40) + 1


def _smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return the centred mean over ``reach`` points on either side."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for i in range(len(values)):
        # The window shrinks towards both ends, so that the line does not lag behind the points.
        span = min(reach, i, len(values) - 1 - i)
        means.append((sums[i + span + 1] - sums[i - span]) / (2 * span + 1))
    return means
