"""Checks the versions of the installed packages, from their metadata, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import dpmon
from dpmon.cli.checks.check import Check, ok, problem, warning

_TESTED_TEXTUAL = "8.2."
_PIP = f"{sys.executable} -m pip install"
"""Installs into the Python that runs dpmon."""


def installed() -> Iterator[Check]:
    """dpmon itself and the libraries of its screen and plots."""
    yield ok("dpmon", dpmon.__version__)
    textual = _version("textual")
    if textual is None:
        yield problem("textual", "not installed: dpmon cannot show a screen", f"{_PIP} 'textual=={_TESTED_TEXTUAL}*'")
    elif not textual.startswith(_TESTED_TEXTUAL):
        remedy = f"{_PIP} 'textual=={_TESTED_TEXTUAL}*'"
        yield warning("textual", f"{textual} was not tested with dpmon ({_TESTED_TEXTUAL}* was)", remedy)
    else:
        yield ok("textual", textual)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
