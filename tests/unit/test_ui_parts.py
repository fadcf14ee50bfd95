"""Small parts of pictures: bars, frames, the look, the footer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.color import Color, ColorSystem
from rich.console import Console

from dpmon.text.cells import truncate
from dpmon.text.palettes import PALETTES, Palette
from dpmon.ui.chart import block_line, filled_bar, range_bar
from dpmon.ui.dialogs import LineInput
from dpmon.ui.footer import current_key_hints, key_at, render_footer
from dpmon.ui.help_text import help_rows
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import draw_frame, fit_row, plain_text, row_width
from dpmon.ui.terminal_style import LETTERS, MONO, choose_style
from support.history_builders import snapshot_of_rows
from support.record_builders import Training
from support.screen_states import STYLE, exit_info_of


def some_facts() -> ScreenData:
    training = Training()
    state = snapshot_of_rows([*training.begin(), *training.run(20)])
    return ScreenData(state, training.now, is_command_alive=True, can_toggle=True, can_type=True)


def test_the_footer_offers_only_what_works() -> None:
    facts = some_facts()
    view = "l slow steps [ ] range < > time s screenshot"
    said = f"d → single space freeze 1-6 panel enter zoom i input w why {view} x stop"
    said += " t theme : list ? help q leave"
    assert " ".join(plain_text(render_footer(facts, 200)[0]).split()) == said
    nothing = replace(facts, can_toggle=False, can_type=False, exit_info=exit_info_of(0, None, 1))
    said = f"space play 1-6 panel enter zoom {view} t theme : list ? help q close"
    assert " ".join(plain_text(render_footer(nothing, 200)[0]).split()) == said


@pytest.mark.parametrize("over", [False, True])
def test_the_footer_leaves_out_what_matters_least_and_says_so(over: bool) -> None:
    facts = replace(some_facts(), can_pause=True)
    if over:
        facts = replace(some_facts(), can_toggle=False, can_type=False, exit_info=exit_info_of(1, None, 1))
    everything = {f"{key} {word}" for key, word in [hint[:2] for hint in current_key_hints(facts)]}
    least = len(everything)
    for width in range(200, 39, -1):
        row = render_footer(facts, width)[0]
        text = plain_text(row)
        assert "? help" in text
        assert (": more" in text) == (": list" not in text)
        assert text.rstrip().endswith("close" if over else "leave")
        named = [span for span, style in row if style == "key"]
        assert (": more" in text) == (len(named) < len(everything)), text
        assert "…" not in text, "nothing is cut"
        least = min(least, len(named))
        for key in named:
            assert key_at(row, text.index(f" {key} ") + 1) == key
    assert least >= 4
    wanted = "1-6 panel < > time l slow" if over else "d → single p pause space freeze 1-6 panel x stop"
    assert set(wanted.split()) <= set(plain_text(render_footer(facts, 80)[0]).split())


@pytest.mark.parametrize("width", range(1, 20))
def test_cutting_measures_cells_and_leaves_a_sign(width: int) -> None:
    for text in ("short", "漢字漢字漢字漢字漢字", "a漢b字c漢d字e漢f"):
        shown = truncate(text, width)
        assert row_width([(shown, "")]) <= width
        if row_width([(text, "")]) > width:
            assert shown.endswith("…")
        assert row_width(fit_row([(text, "x"), (text, "y")], width)) == width


def test_a_frame_says_what_it_left_out() -> None:
    rows = draw_frame([("Title", "")], [("corner", "")], [[(str(i), "")] for i in range(10)], 30, 6)
    assert plain_text(rows[-1]).endswith(" 6 more ↓ ─╯")
    assert {row_width(row) for row in rows} == {30}
    folded = draw_frame([("Title", "")], [("42%", "")], [], 30, 1)
    assert plain_text(folded[0]).split() == ["Title", "42%"]
    title = [("1 Devices", ""), (" · host", "")]
    for width in range(8, 40):
        (row,) = draw_frame(title, [("cpu 100%", "")], [], width, 1)
        assert row_width(row) == width
        text = plain_text(row).rstrip()
        assert "cpu" not in text or text.endswith("cpu 100%"), "the whole number, or none"
        assert width < 11 or text.startswith(" 1 Devices")
        assert ("cpu" in text) == (width >= 21)
        assert not text or width < 12 or plain_text(row).endswith(" "), "the next title does not touch it"


def test_bars_and_lines() -> None:
    assert plain_text(filled_bar((0.5,), 8)) == "━━━━────"
    assert plain_text(filled_bar((0.001,), 8)) == "━───────", "something is never nothing"
    assert plain_text(filled_bar((0.0,), 8)) == "────────"
    assert plain_text(filled_bar(None, 4)) == "····"
    assert block_line([0, 50, 100, None], 6) == " ▄█·  "
    assert range_bar(1, 2, 4, 4, 9) == "  ╶─●───╴"


@pytest.mark.parametrize("width", [76, 108])
def test_the_help_explains_every_phase_in_a_sentence(width: int) -> None:
    rows = help_rows(width, STYLE)
    assert all(row_width(row) <= width for row in rows)
    text = " ".join(plain_text(row) for row in rows)
    for word in LETTERS:
        assert f"{word} " in text
    for panel in ("1 Devices", "2 Replicas", "3 Batch", "5 Output"):
        assert panel in text


def test_the_look_follows_the_terminal() -> None:
    usual = choose_style({"TERM": "xterm-256color"}, "utf-8")
    assert (usual.theme, usual.is_ascii, usual.styles) == (STYLE.theme, False, STYLE.styles)
    assert choose_style({"TERM": "xterm", "NO_COLOR": "1"}, "UTF-8").styles is MONO
    assert choose_style({"TERM": "xterm"}, "ANSI_X3.4-1968").is_ascii
    assert choose_style({"TERM": "linux"}, "utf-8").is_ascii
    plain_one = choose_style({"TERM": "vt100"}, "utf-8")
    assert (plain_one.is_ascii, plain_one.styles, plain_one.has_color) == (True, MONO, False)
    assert choose_style({}, None).is_ascii


def test_the_next_theme_keeps_to_ascii_where_the_terminal_needs_it() -> None:
    look = choose_style({"TERM": "xterm"}, "ascii")
    for theme in ["light", "color-blind", "mono", "ascii", "dark"]:
        look = look.with_next_theme()
        assert (look.theme, look.is_ascii) == (theme, True)


@pytest.mark.parametrize("theme", PALETTES)
def test_phases_stay_apart_on_a_terminal_of_sixteen_colors(theme: str) -> None:
    """Compare the colors that Rich sends to it; without special colors, phases would have the same."""
    look = choose_style({"TERM": "screen"}, "utf-8", theme)

    def sent(name: str) -> Color:
        style = look.rich_style(name)
        assert style.color is not None
        return style.color.downgrade(ColorSystem.STANDARD)

    back = look.rich_style("").bgcolor
    assert back is not None
    seen = [sent(f"phase.{phase}") for phase in LETTERS]
    assert len({*seen, back.downgrade(ColorSystem.STANDARD)}) == len(LETTERS) + 1
    assert sent("mode.dp") != sent("mode.single")
    between = look.rich_style("phase.data/other")
    assert between.color is not None
    assert between.color.downgrade(ColorSystem.STANDARD) == sent("phase.data"), "in one cell of two colors, too"
    assert look.with_next_theme().has_few_colors, "in the next theme, too"


@pytest.mark.parametrize("term", ["xterm", "screen", "linux", "xterm-16color", "tmux-256color", "xterm-kitty", ""])
@pytest.mark.parametrize("more", [{}, {"COLORTERM": "truecolor"}, {"COLORTERM": " 24bit"}, {"COLORTERM": "yes"}])
def test_the_number_of_colors_is_the_one_that_rich_finds(term: str, more: dict[str, str]) -> None:
    environ = {"TERM": term, **more}
    rich = Console(force_terminal=True, _environ=environ).color_system
    assert choose_style(environ, "utf-8", "dark").has_few_colors == (rich == "standard")
    for told in ("standard", "256", "truecolor"):
        assert choose_style({**environ, "TEXTUAL_COLOR_SYSTEM": told}, "utf-8").has_few_colors == (told == "standard")


@pytest.mark.parametrize("palette", PALETTES.values(), ids=lambda p: p.name)
def test_everything_stands_out_from_its_background(palette: Palette) -> None:
    """Contrast of WCAG 2, at least 4.5 to 1: also colors of drawings stand behind text, in chips and lanes."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(color: str) -> float:
        low, high = sorted((luminance(color), luminance(palette.background)))
        return (high + 0.05) / (low + 0.05)

    for name in ("text", "dim", "strong", "focus", "good", "wait", "bad", "bar", "dp", "single"):
        assert contrast(getattr(palette, name)) >= 4.5, name
    for name, color in palette.by_phase.items():
        assert contrast(color) >= 4.5, (name, contrast(color))
    for number, color in enumerate((*palette.ansi, *palette.bright)):
        assert contrast(color) >= 4.5, (number, color)
    assert len(set(palette.phases)) == len(palette.phases)


def test_a_scripts_colors_stay_legible_on_a_light_background() -> None:
    for theme in ("light", "dark"):
        for color in ("color(231)", "color(16)", "#ffff00", "#000010"):
            style = choose_style({"TERM": "xterm"}, "utf-8", theme).rich_style(f"sgr:{color}")
            assert style.color is not None
            assert style.color.triplet is not None
            light = 0.299 * style.color.triplet[0] + 0.587 * style.color.triplet[1] + 0.114 * style.color.triplet[2]
            assert (light < 190) if theme == "light" else (light > 80), (theme, color)
    both = choose_style({"TERM": "xterm"}, "utf-8", "light").rich_style("sgr:#ffffff on #000000")
    assert both.color == Color.parse("#ffffff"), "with a background of its own it stays"


def test_a_hidden_line_is_typed_without_echo() -> None:
    line = LineInput("Input", "", STYLE, hides_text=True)
    line.typed_text = "hunter2"
    text = "".join(part for row in line.build_rows(40, 5) for part, _ in row)
    assert "hunter2" not in text
    assert "*" * 7 in text
