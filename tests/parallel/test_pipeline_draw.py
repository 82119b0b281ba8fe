"""Pictures: columns and bars stand where the passes are."""

from __future__ import annotations

import re
import struct
from xml.etree import ElementTree

import pytest

from mcore_parallel.pipeline.collective_actions import with_collectives
from mcore_parallel.pipeline.compile import compile_schedule
from mcore_parallel.pipeline.draw import to_png, to_svg, to_text
from mcore_parallel.pipeline.simulate import Costs, Timeline, simulate
from mcore_parallel.plugins import Registry, plugin_manager

SCHEDULES = Registry("schedule", plugin_manager().collect("mcore_pipeline_schedules"))
SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, p: int, m: int, v: int | None = None) -> Timeline:
    return simulate(compile_schedule(SCHEDULES[name], num_ranks=p, num_micro_batches=m, num_chunks=v))


def test_text_by_hand() -> None:
    assert to_text(timeline("1f1b", 2, 2), width=25).splitlines()[:2] == [
        "rank 0 F0F1....B0--..B1--",
        "rank 1 ..F0B0--F1B1--....",
    ]
    assert to_text(timeline("zbv", 2, 3), width=60).splitlines() == [
        "rank 0 F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2..",
        "rank 1 ..F0f0F1f1i0w0F2I0W0f2i1w1I1i2I2W1w2W2",
        "makespan 19, bubble 5.3% of the makespan, 0.0% of a rank's span; at most 4 live activations and 3 deferred "
        "weight gradients on a rank",
    ]


def test_the_third_chunk_is_numbered() -> None:
    assert (
        to_text(timeline("interleaved", 1, 1, 3), width=60).splitlines()[0]
        == "rank 0 F0--f0--F0.2B0.2----b0------B0------"
    )


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipev"])
def test_rows_are_as_long_as_each_other_and_fit(name: str, width: int) -> None:
    rows = to_text(timeline(name, 4, 16), width=width).splitlines()[:-1]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width


def test_narrow_terminals_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 20 columns, got 19"):
        to_text(timeline("1f1b", 2, 2), width=19)


def test_colour_changes_no_letter() -> None:
    plain, coloured = (to_text(timeline("zbv", 2, 3), width=60, colour=colour) for colour in (False, True))
    assert "\x1b[30;44mF0\x1b[0m" in coloured
    assert "\x1b[30;104mf0\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_svg_has_a_bar_per_pass_in_its_place() -> None:
    drawn = timeline("zb-h1", 3, 4)
    root = ElementTree.fromstring(to_svg(drawn, title="a < b & c"))
    assert root.findall(f"{SVG}text")[0].text == "a < b & c"
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == sum(len(spans) for spans in drawn.spans) == 3 * 3 * 4
    by_title = {bar.find(f"{SVG}title").text: bar for bar in bars}
    first, last = by_title["rank 0: forward, chunk 0, micro-batch 0, 0 to 1"], bars[-1]
    scale = float(first.get("width"))
    assert scale == 22
    end = float(last.get("x")) + float(last.get("width")) - float(first.get("x"))
    assert end == pytest.approx(drawn.makespan * scale, abs=0.05)
    assert len({bar.get("y") for bar in bars}) == 3


def test_collectives_are_thin_bars_below() -> None:
    plan = with_collectives(compile_schedule(SCHEDULES["1f1b"], num_ranks=2, num_micro_batches=2))
    svg = to_svg(simulate(plan, Costs(gather=1.0, reduce=2.0)))
    heights = re.findall(r'height="(\d+)" fill="#[0-9a-f]+" stroke="white"[^>]*><title>rank \d: (\w+)', svg)
    assert heights.count(("5", "gather")) == heights.count(("5", "reduce")) == 2
    assert heights.count(("24", "forward")) == 4


def test_later_chunks_are_lighter() -> None:
    svg = to_svg(timeline("interleaved", 2, 2, 2))
    shades = {
        chunk: set(re.findall(rf'fill="(#\w+)"[^>]*><title>rank \d: forward, chunk {chunk}', svg)) for chunk in (0, 1)
    }
    assert [len(found) for found in shades.values()] == [1, 1]
    assert shades[0] != shades[1]


def test_png() -> None:
    image = to_png(timeline("zbv", 4, 8), title="zbv")
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width > 2 * height > 200
