"""Pictures of a timeline: text for a terminal, SVG, and PNG. No torch."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

from mcore_parallel.pipeline.actions import COLLECTIVE_KINDS, COMPUTE_KINDS, Kind
from mcore_parallel.pipeline.simulate import Span, Timeline

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.REDUCE: "reduce",
    Kind.GATHER: "gather",
}
# Colour-blind safe hues, with dark text legible on all of their lighter shades.
_COLOURS = {
    Kind.FORWARD: (86, 180, 233),
    Kind.BACKWARD: (0, 158, 115),
    Kind.INPUT_GRAD: (120, 200, 140),
    Kind.WEIGHT_GRAD: (230, 159, 0),
    Kind.REDUCE: (204, 121, 167),
    Kind.GATHER: (160, 160, 160),
}
_ANSI = {Kind.FORWARD: 44, Kind.BACKWARD: 42, Kind.INPUT_GRAD: 46, Kind.WEIGHT_GRAD: 43}
_ROW, _BAR, _LEFT, _TOP, _BOTTOM = 34, 24, 64, 44, 60


def to_text(timeline: Timeline, *, width: int = 120, colour: bool = False) -> str:
    """One line per rank and one of figures, for a terminal of ``width`` columns.

    A pass is its letter and micro-batch, drawn out with ``-`` as long as it takes; its letter is small for odd chunks.
    A dot is idle time. Where columns are too few, labels are cut down to the letter, then passes share columns.
    ``colour``: with ANSI background colours, brighter for odd chunks.

    Raises:
        ValueError: fewer than 20 columns.
    """
    if width < 20:
        raise ValueError(f"a timeline needs at least 20 columns, got {width}")
    margin = len(f"rank {len(timeline.spans) - 1} ")
    scale = _columns_per_time(timeline, width - margin)
    lines = []
    for rank, spans in enumerate(timeline.spans):
        line, at = f"rank {rank}".ljust(margin), 0
        for span in spans:
            if span.action.kind not in COMPUTE_KINDS:
                continue
            start, end = max(at, _column(span.start * scale)), _column(span.end * scale)
            line += "." * (start - at) + _cell(span, max(0, end - start), colour)
            at = max(start, end)
        lines.append(line + "." * (_column(timeline.makespan * scale) - at))
    return "\n".join([*lines, summary(timeline)])


def summary(timeline: Timeline) -> str:
    """Makespan, bubbles and memory in one line."""
    return (
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble_makespan:.1%} of the makespan, "
        f"{timeline.bubble_span:.1%} of a rank's span; at most {max(timeline.peak_live)} live activations and "
        f"{max(timeline.peak_deferred)} deferred weight gradients on a rank"
    )


def to_svg(timeline: Timeline, *, title: str = "") -> str:
    """The timeline as an SVG document: a row per rank, a bar per pass, with a tooltip for each; chunks by shade."""
    scale, ranks = _pixels_per_time(timeline), len(timeline.spans)
    width, height = _LEFT + timeline.end * scale + 20, _TOP + ranks * _ROW + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="34" fill="#555">{escape(summary(timeline))}</text>',
    ]
    for rank in range(ranks):
        y = _TOP + rank * _ROW
        parts.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{timeline.makespan * scale:.2f}" height="{_BAR}" fill="#f0f0f0"/>'
        )
    parts += [_svg_bar(bar, scale) for bar in _bars(timeline)]
    parts += _svg_legend(timeline, _TOP + ranks * _ROW + 24)
    return "\n".join([*parts, "</svg>"]) + "\n"


def to_png(timeline: Timeline, *, title: str = "") -> bytes:
    """The timeline as a PNG image, by matplotlib without a display."""
    # Here, because it takes a second to import, and nothing else needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = len(timeline.spans)
    points = _pixels_per_time(timeline) * timeline.end / 72
    figure = Figure(figsize=(min(60.0, max(8.0, points)), 1.6 + 0.45 * ranks), layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    per_time = (figure.get_figwidth() - 1) * 72 / timeline.end if timeline.end else 0.0
    for bar in _bars(timeline):
        colour = tuple(channel / 255 for channel in bar.colour)
        height, y = (0.12, bar.rank + 0.44) if bar.is_thin else (0.72, bar.rank)
        axes.barh(y, bar.length, left=bar.start, height=height, color=colour, edgecolor="white", linewidth=0.4)
        if not bar.is_thin and bar.length * per_time > 5 * len(bar.label):
            axes.text(bar.start + bar.length / 2, y, bar.label, ha="center", va="center", fontsize=7)
    for kind in _kinds(timeline):
        axes.barh(0, 0, color=tuple(channel / 255 for channel in _COLOURS[kind]), label=_WORDS[kind])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_xlim(0, timeline.end or 1.0)
    axes.set_xlabel("time")
    axes.set_title(f"{title}\n{summary(timeline)}" if title else summary(timeline), fontsize=9, loc="left")
    figure.legend(loc="outside lower left", ncols=6, fontsize=8, frameon=False)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


class _Bar(NamedTuple):
    rank: int
    start: float
    length: float
    label: str
    tooltip: str
    colour: tuple[int, int, int]
    is_thin: bool


def _bars(timeline: Timeline) -> Iterator[_Bar]:
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            kind, micro_batch, chunk = span.action
            is_thin = kind in COLLECTIVE_KINDS
            what = f"{_WORDS[kind]}, chunk {chunk}" + ("" if is_thin else f", micro-batch {micro_batch}")
            yield _Bar(
                rank=rank,
                start=span.start,
                length=span.end - span.start,
                label=str(micro_batch),
                tooltip=f"rank {rank}: {what}, {span.start:g} to {span.end:g}",
                colour=_shade(kind, chunk, timeline.flow.num_chunks),
                is_thin=is_thin,
            )


def _kinds(timeline: Timeline) -> list[Kind]:
    found = {span.action.kind for spans in timeline.spans for span in spans}
    return [kind for kind in _WORDS if kind in found]


def _shade(kind: Kind, chunk: int, num_chunks: int) -> tuple[int, int, int]:
    """The colour of ``kind``, the lighter the later the chunk."""
    light = 0.6 * chunk / max(1, num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (round(channel + (255 - channel) * light) for channel in _COLOURS[kind])
    return red, green, blue


def _svg_bar(bar: _Bar, scale: float) -> str:
    top = _TOP + bar.rank * _ROW
    y, height = (top + _BAR + 1, 5) if bar.is_thin else (top, _BAR)
    x, length = _LEFT + bar.start * scale, bar.length * scale
    red, green, blue = bar.colour
    shape = (
        f'<rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="{height}" fill="#{red:02x}{green:02x}{blue:02x}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(bar.tooltip)}</title></rect>'
    )
    if bar.is_thin or length < 7 * len(bar.label):
        return shape
    return shape + f'<text x="{x + length / 2:.2f}" y="{y + 16}" text-anchor="middle">{bar.label}</text>'


def _svg_legend(timeline: Timeline, y: int) -> list[str]:
    parts, x = [], _LEFT
    for kind in _kinds(timeline):
        red, green, blue = _COLOURS[kind]
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="#{red:02x}{green:02x}{blue:02x}"/>')
        parts.append(f'<text x="{x + 19}" y="{y + 11}">{_WORDS[kind]}</text>')
        x += 36 + 7 * len(_WORDS[kind])
    if timeline.flow.num_chunks > 1:
        parts.append(f'<text x="{x}" y="{y + 11}" fill="#555">lighter: later chunks</text>')
    return parts


def _shortest(timeline: Timeline) -> float:
    lengths = (span.end - span.start for spans in timeline.spans for span in spans if span.action.kind in COMPUTE_KINDS)
    return min((length for length in lengths if length > 0), default=1.0)


def _pixels_per_time(timeline: Timeline) -> float:
    """22 pixels for the shortest pass, within 8,000 in all."""
    return min(22 / _shortest(timeline), 8000 / timeline.end) if timeline.end else 1.0


def _columns_per_time(timeline: Timeline, columns: int) -> float:
    """At most four columns for the shortest pass, a whole number of them if there is room, so that labels line up."""
    if not timeline.makespan:
        return 1.0
    shortest = _shortest(timeline)
    each = columns * shortest / timeline.makespan
    return min(4, math.floor(each) if each >= 1 else each) / shortest


def _column(position: float) -> int:
    return math.floor(position + 0.5)


def _cell(span: Span, columns: int, colour: bool) -> str:
    kind, micro_batch, chunk = span.action
    letter = kind.value.lower() if chunk % 2 else kind.value
    labels = [f"{letter}{micro_batch}.{chunk}"] if chunk > 1 else []
    labels += [f"{letter}{micro_batch}", letter, ""]
    label = next(label for label in labels if len(label) <= columns)
    text = label.ljust(columns, "-" if not colour else " ")
    if not colour or not columns:
        return text
    background = _ANSI[kind] + (60 if chunk % 2 else 0)
    return f"\x1b[30;{background}m{text}\x1b[0m"
