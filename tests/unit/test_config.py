"""Settings in the configuration file and in variables, and messages about invalid settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.config import ConfigError, Settings, config_path, load_settings


def written(home: Path, text: str) -> dict[str, str]:
    """Return an environment with the configuration `text`."""
    (home / "dpmon").mkdir(parents=True, exist_ok=True)
    (home / "dpmon" / "config.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(home)}


def test_nothing_is_set_by_default(tmp_path: Path) -> None:
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}) == Settings(None, None, None, None)


def test_a_command_for_events_is_a_list_or_a_line_of_a_shell(tmp_path: Path) -> None:
    environ = written(tmp_path, 'on_event = ["tell", "two words"]\nalive_minutes = 10\n')
    found = load_settings(environ)
    assert (found.on_event, found.alive_minutes) == (("tell", "two words"), 10)
    assert load_settings({**environ, "DPMON_ON_EVENT": "tell 'two words' three"}).on_event == (
        "tell",
        "two words",
        "three",
    )


@pytest.mark.parametrize(("text", "found"), [("", None), ("loss = false", False), ("loss = true", True)])
def test_whether_losses_are_read_is_a_switch(tmp_path: Path, text: str, found: bool | None) -> None:
    environ = written(tmp_path, text)
    assert load_settings(environ).loss is found
    assert load_settings({**environ, "DPMON_LOSS": "false"}).loss is False


def test_the_file_and_the_variables_before_it(tmp_path: Path) -> None:
    environ = written(tmp_path, 'theme = "light"\nrefresh = 0.5\nkeep_runs = 20\nkeep_bytes = "1.5 GiB"\n')
    assert load_settings(environ) == Settings("light", 0.5, 20, 3 << 29)
    environ |= {
        "DPMON_THEME": "color-blind",
        "DPMON_REFRESH": "2",
        "DPMON_KEEP_RUNS": "0",
        "DPMON_KEEP_BYTES": "500MB",
    }
    assert load_settings(environ) == Settings("color-blind", 2.0, 0, 500_000_000)
    assert load_settings({**environ, "DPMON_THEME": ""}).theme == "light", "empty is not set"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('theme = "pink"', "theme is one of dark, light, color-blind, mono, ascii, not 'pink'"),
        ("refresh = 0", "refresh is a number of seconds from 0.1 to 60, not '0'"),
        ("refresh = true", "refresh is a number of seconds from 0.1 to 60, not 'True'"),
        ("refresh = nan", "refresh is a number of seconds from 0.1 to 60, not 'nan'"),
        ('refresh = "soon"', "refresh is a number of seconds from 0.1 to 60, not 'soon'"),
        ("keep_runs = -1", "keep_runs is a whole number, not '-1'"),
        ("keep_runs = 1.5", "keep_runs is a whole number, not '1.5'"),
        ('keep_bytes = "much"', "keep_bytes is a size"),
        ('keep_bytes = "1 ZB"', "keep_bytes is a size"),
        ('on_event = ""', 'on_event is a command such as "notify --title dpmon"'),
        ("on_event = []", "on_event is a command such as"),
        ('on_event = ["tell", 1]', "on_event is a command such as"),
        ('on_event = ["tell", "\\u0000"]', "on_event is a command such as"),
        ('on_event = "tell \'me"', "on_event is a command such as"),
        ("loss = 0", "loss is true or false, not '0'"),
        ("alive_minutes = 0", "alive_minutes is a number of minutes from 1, not '0'"),
        ("alive_minutes = 0.5", "alive_minutes is a number of minutes from 1, not '0.5'"),
        ("them = 1", "unknown setting 'them'; valid settings: theme, refresh, keep_runs, keep_bytes"),
        ("theme = ", "is not TOML"),
    ],
)
def test_a_setting_that_means_nothing_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(written(tmp_path, text))
    assert said in str(error.value)
    assert str(config_path({"XDG_CONFIG_HOME": str(tmp_path)})) in str(error.value)


def test_a_variable_is_named_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DPMON_REFRESH is a number of seconds from 0\.1 to 60, not 'x'"):
        load_settings({"XDG_CONFIG_HOME": str(tmp_path), "DPMON_REFRESH": "x"})


def test_a_wrong_setting_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DPMON_THEME", "pi\x1bnk")
    (tmp_path / "script.py").write_text("print('ran')")
    assert main([str(tmp_path / "script.py")]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "DPMON_THEME is one of dark" in said.err
    assert "\x1b" not in said.err
    assert said.out == ""
    assert not (tmp_path / "state").exists()
    assert main(["ls"]) == 0, "what does not draw does not mind"


def test_without_a_file_no_parser_is_loaded(tmp_path: Path) -> None:
    code = "import os, sys; from dpmon.config import load_settings; load_settings(os.environ)"
    code += "; print('tomllib' in sys.modules)"
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who may give a file to another user")
def test_the_file_of_another_user_names_no_command(tmp_path: Path) -> None:
    environ = written(tmp_path, 'on_event = ["tell"]\n')
    os.chown(tmp_path / "dpmon" / "config.toml", 65534, -1)
    with pytest.raises(ConfigError, match="on_event is a command, and the file belongs to another user"):
        load_settings(environ)
    environ = written(tmp_path, 'theme = "dark"\n')
    assert load_settings(environ).theme == "dark"


def test_prices_and_their_currency(tmp_path: Path) -> None:
    environ = written(tmp_path, 'price_per_kwh = 0.3\nprice_per_hour = 2\ncurrency = "EUR"\n')
    found = load_settings(environ)
    assert (found.price_per_kwh, found.price_per_hour, found.currency) == (0.3, 2.0, "EUR")
    assert len(load_settings({**environ, "DPMON_CURRENCY": "gold coins \x1b[31m"}).currency) == 8
    for price in ("-1", "nan", "inf", "a lot", "true"):
        with pytest.raises(ConfigError, match="a price from 0"):
            load_settings({**environ, "DPMON_PRICE_PER_KWH": price})
