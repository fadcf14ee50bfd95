"""The user's settings, from environment variables and a file; variables take precedence.

The file is `$XDG_CONFIG_HOME/dpmon/config.toml` (`~/.config` if that is not set). docs/getting-started.md describes the
settings. The variable of a setting has its name in capitals, after DPMON_.

Options on the command line take precedence over both.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpmon.errors import DpmonError
from dpmon.sanitize import sanitize_line

THEMES = ("dark", "light", "color-blind", "mono", "ascii")
_PREFIXES = "KMGT"
_UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
}


class ConfigError(DpmonError):
    """An invalid setting, or an unreadable configuration file; the text is one sentence for the user."""


@dataclass(frozen=True)
class Settings:
    """The user's settings; None for a setting that is not given. `refresh` is in seconds."""

    theme: str | None = None
    refresh: float | None = None
    keep_runs: int | None = None
    keep_bytes: int | None = None
    batch_dim: int | None = None
    on_event: tuple[str, ...] | None = None
    """The command to start for each event of a run."""
    alive_minutes: int | None = None
    """Minutes between two `alive` events."""
    loss: bool | None = None
    """Whether to read the losses."""
    price_per_kwh: float = 0.0
    price_per_hour: float = 0.0
    """Price of an hour of the run, with all its machines."""
    currency: str = ""


def _parse_choice(names: Collection[str], value: Any) -> str:
    if value not in names:
        raise ValueError(f"one of {', '.join(names)}")
    return str(value)


def _parse_number(expected: str, pattern: str, value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(pattern, str(value)):
        raise ValueError(expected)
    return int(value)


def _parse_float(expected: str, low: float, high: float, value: Any) -> float:
    with suppress(ValueError, TypeError):
        if low <= float(value) <= high and not isinstance(value, bool):
            return float(value)
    raise ValueError(expected)


def _parse_command(value: Any) -> tuple[str, ...]:
    with suppress(ValueError):
        words = shlex.split(value) if isinstance(value, str) else value
        if words and isinstance(words, list) and all(isinstance(word, str) and "\0" not in word for word in words):
            return tuple(words)
    raise ValueError('a command such as "notify --title dpmon" or ["notify", "--title", "dpmon"]')


def _parse_bool(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError("true or false")
    return str(value).lower() == "true"


def _parse_byte_size(value: Any) -> int:
    match = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,3})?\s*([A-Za-z]{0,3})", str(value).strip())
    unit = None if match is None or isinstance(value, float) else _UNITS.get(match[3].upper())
    if match is None or unit is None:
        raise ValueError('a size such as "500 MB" or "5 GiB"')
    return int(match[1]) * unit + int(float(match[2] or 0) * unit)


SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "theme": partial(_parse_choice, THEMES),
    "refresh": partial(_parse_float, "a number of seconds from 0.1 to 60", 0.1, 60),
    "keep_runs": partial(_parse_number, "a whole number", r"[0-9]{1,9}"),
    "keep_bytes": _parse_byte_size,
    "batch_dim": partial(_parse_number, "a number from 0 to 7", r"[0-7]"),
    "on_event": _parse_command,
    "alive_minutes": partial(_parse_number, "a number of minutes from 1", r"(?!0+$)[0-9]{1,9}"),
    "loss": _parse_bool,
    "price_per_kwh": partial(_parse_float, "a price from 0 to 1,000,000", 0, 1e6),
    "price_per_hour": partial(_parse_float, "a price from 0 to 1,000,000", 0, 1e6),
    "currency": partial(sanitize_line, limit=8),
}
"""For each setting, the function that parses its value. It raises ValueError, with the expected form, if invalid."""


def home_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the user's home directory; None if neither HOME nor the system has an absolute path."""
    home = environ.get("HOME", "")
    if os.path.isabs(home):
        return Path(home)
    try:
        system_home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(system_home) if os.path.isabs(system_home) else None


def config_path(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the configuration file, which may not exist; None if there is no directory for it.

    A relative XDG_CONFIG_HOME is ignored, as the XDG Base Directory Specification requires.
    """
    config_home = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config_home):
        return Path(config_home) / "dpmon" / "config.toml"
    home = home_directory(environ)
    return None if home is None else home / ".config" / "dpmon" / "config.toml"


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings from the file and from `environ`. Raises ConfigError at the first invalid setting."""
    path = config_path(environ)
    values: dict[str, Any] = {}
    for name, value in _read_config_file(path).items() if path is not None else ():
        if name not in SETTINGS:
            raise ConfigError(f"{path}: unknown setting {name!r}; valid settings: {', '.join(SETTINGS)}")
        values[name] = _validate_setting(name, value, f"{path}: {name}")
    for name in SETTINGS:
        variable = f"DPMON_{name.upper()}"
        if environ.get(variable):
            values[name] = _validate_setting(name, environ[variable], variable)
    return Settings(**values)


def _validate_setting(name: str, value: Any, source: str) -> Any:
    try:
        return SETTINGS[name](value)
    except ValueError as error:
        raise ConfigError(f"{source} is {error}, not {str(value)[:60]!r}") from None


def _read_config_file(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    # Imported only if there is a file, because the import delays the first frame.
    import tomllib

    try:
        table = tomllib.loads(data.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if "on_event" in table and path.stat().st_uid not in (0, os.getuid()):
        raise ConfigError(f"{path}: on_event is a command, and the file belongs to another user")
    return table
