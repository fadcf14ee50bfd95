"""The plots of a page: all values are inside, ranks are drawn, and a few long steps do not flatten the rest."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from joined import joined_rows
from kept import keep

from dpmon.report.collect import collect
from dpmon.report.document import Plot, Values
from dpmon.report.page import HEIGHT, WIDTH, drawn, page
from dpmon.report.plots import plots
from dpmon.report.sections import document


def svg_of(plot: Plot) -> ElementTree.Element:
    text = drawn(plot)
    return ElementTree.fromstring(re.sub(r"(class|style)=([a-z]+)([ >])", r'\1="\2"\3', text[text.index("<svg") :]))


def lines(*values: float | None) -> Plot:
    points = [(at, at + 1, y) for at, y in enumerate(values) if y is not None]
    return Plot("p", "P", "", [Values("s", "#000000", points, "steps")], "ms")


def test_one_long_step_does_not_flatten_the_others_and_is_told() -> None:
    text = "".join(svg_of(lines(*[10.0, 11.0] * 20, 5000.0)).itertext())
    assert "1 higher, up to 5000: cut" in text
    assert "20.0" in text, "the axis"
    assert "cut" not in "".join(svg_of(lines(*[10.0, 11.0] * 20, 25.0)).itertext())
    few = "".join(svg_of(lines(10.0, 11.0, 230.0, 45_000.0)).itertext())  # means and longest steps of two modes
    assert "1 higher, up to 45,000: cut" in few.replace("45000", "45,000")
    assert "400" in few, "the axis"
    rows = Plot("p", "P", "", [Values("s", "#000000", [(r, r, y) for r, y in enumerate((1, 1, 1, 9))], "bars")], "ms")
    assert "cut" not in "".join(svg_of(rows._replace(rows=["a", "b", "c", "d"])).itertext()), "the slow one is shown"


@pytest.mark.parametrize("values", [(), (0.0,), (0.0, 0.0), (None, 1.0, None), (1e-9, 1e12)])
def test_odd_values_are_drawn_inside(values: tuple[float | None, ...]) -> None:
    for name, text in ((one.tag, value) for one in svg_of(lines(*values)).iter() for value in one.attrib.values()):
        assert "nan" not in text, (name, text)
        assert "inf" not in text, (name, text)


def test_ranks_are_drawn_and_the_straggler_waits_for_nobody(state: Path) -> None:
    made, _ = joined_rows(3, slow=1, phase="data", steps=100, noise=0.0)
    story = collect(keep(made))
    (plot,) = [plot for plot in plots(story.facts) if plot.name == "ranks"]
    assert plot.rows == ["rank 0", "rank 1", "rank 2"]
    by_name = {one.name: [y for _, _, y in one.points] for one in plot.series}
    assert by_name["data"] == [pytest.approx(ms) for ms in (0.4, 6.4, 0.4)]
    assert by_name["wait"] == [pytest.approx(ms, abs=0.01) for ms in (6.0, 0.0, 6.0)]
    bars = [one for one in svg_of(plot).iter("rect") if one.find("title") is not None]
    assert all(0 <= float(bar.attrib["x"]) + float(bar.attrib["width"]) <= WIDTH for bar in bars)
    text = page(document(story))
    assert len(text.encode()) < 200_000
    names = [re.sub(r"<.*?>", "", name) for name in re.findall(r"<h2 id=.*?>(.*?)</h2>", text)]
    assert re.findall(r'<a href="#part-\d+">(.*?)</a>', text) == names
    assert "Communication" in names


def test_bars_stand_on_each_other(state: Path) -> None:
    series = [Values(name, "#000000", [(0.0, 1.0, 1.0), (1.0, 2.0, 2.0)], "bars") for name in ("a", "b")]
    bars = [one for one in svg_of(Plot("p", "P", "", series, "ms")).iter("rect") if one.find("title") is not None]
    places = [(float(bar.attrib["y"]), float(bar.attrib["height"])) for bar in bars]
    assert len(places) == 4
    for lower, upper in zip(places[:2], places[2:], strict=True):
        assert upper[0] + upper[1] == pytest.approx(lower[0], abs=0.2)
    assert all(0 <= y <= HEIGHT for y, _ in places)
