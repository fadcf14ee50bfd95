"""Makes the man page and the completions from the parser of the command line: `python docs/shell/generate.py`.

shtab and argparse-manpage are needed to make them, not to build or use dpmon: the files are in the repository, and a
test says when they are out of date.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from string import Template

import shtab
from argparse_manpage.manpage import Manpage

import dpmon
from dpmon.cli.options import COMMANDS, command_parser, options_with_value, run_parser, usage_lines

__all__ = ["PLACE", "generated"]

PLACE = Path(__file__).parent
_SECTIONS = {
    "exit status": """\
The script's own, or 128+N if signal N ended it. 2 for a wrong command line, with one sentence on standard error.
.B dpmon doctor
exits with 1 if there is a problem.""",
    "files": """\
.TP
.I $XDG_STATE_HOME/dpmon/runs
The runs, a directory each
.RI ( ~/.local/state
if XDG_STATE_HOME is not set).
.TP
.I $XDG_CONFIG_HOME/dpmon/config.toml
Permanent settings: theme, refresh, keep_runs, keep_bytes
.RI ( ~/.config
if XDG_CONFIG_HOME is not set).""",
    "environment": """\
.TP
.BR DPMON_THEME ", " DPMON_REFRESH ", " DPMON_KEEP_RUNS ", " DPMON_KEEP_BYTES
The settings of config.toml. A variable overrides the file, and an option overrides both.
.TP
.B DPMON_METRICS
The same as \\-\\-metrics FILE.""",
}

# These functions use shtab's completion only for the words before the script's name. Runs may also be in the
# directories of `fallback_directories` (dpmon/run/run_registry.py). Anybody can create a directory there, and compgen
# would run `$(...)` in a name, so the names are checked.
_BASH = Template("""
_dpmon_runs() {
    local names=$$(command ls -- "$${XDG_STATE_HOME:-$$HOME/.local/state}/dpmon/runs" \\
        {/var/tmp,"$${TMPDIR:-/tmp}",/dev/shm}/dpmon-$$UID-*/runs 2>/dev/null | grep -Ex '[0-9-]{16}[A-Za-z0-9._-]+')
    compgen -W "last $$names" -- "$$1"
}

_dpmon() {
    local at=1 word=$${COMP_WORDS[COMP_CWORD]} offset
    while ((at < COMP_CWORD)); do
        case $${COMP_WORDS[at]} in
            $commands)
                _shtab_dpmon
                return
                ;;
            $valued)
                if [[ $${COMP_WORDS[at + 1]} == "=" ]]; then
                    if ((at + 2 >= COMP_CWORD)); then # bash splits --mode=dp at the sign
                        [[ $$word == "=" ]] && word=
                        local COMP_WORDS=(dpmon "$${COMP_WORDS[at]}" "$$word") COMP_CWORD=2
                        _shtab_dpmon
                        return
                    fi
                    ((at += 1))
                fi
                if ((at + 1 >= COMP_CWORD)); then
                    _shtab_dpmon
                    return
                fi
                [[ $${COMP_WORDS[at]} == -m ]] && return
                ((at += 2))
                ;;
            --json)
                [[ $${COMP_WORDS[at + 1]} == "=" ]] && ((at += 2)) && ((at >= COMP_CWORD)) && return
                ((at += 1))
                ;;
            --)
                ((at += 1))
                break
                ;;
            -?*) ((at += 1)) ;;
            *) break ;;
        esac
    done
    if ((at < COMP_CWORD)); then
        # A launcher completes its own words; files are offered for those of a script.
        for offset in _comp_command_offset _command_offset; do
            declare -F "$$offset" >/dev/null && "$$offset" "$$at" && break
        done
        return
    fi
    [[ $${COMP_WORDS[COMP_CWORD - 1]} != -- ]] && _shtab_dpmon
    [[ $$word == -* ]] && return
    compopt -o filenames 2>/dev/null
    while IFS= read -r at; do COMPREPLY+=("$$at"); done < <(
        compgen -f -X '!*.py' -- "$$word"
        compgen -d -- "$$word"
        [[ -n $$word ]] && compgen -c -- "$$word"
    )
}

complete -o bashdefault -o default -F _dpmon dpmon
""")

_ZSH = Template("""
_dpmon_runs() {
  local -aU runs=(last $${XDG_STATE_HOME:-$$HOME/.local/state}/dpmon/runs/*(N/:t)
    {/var/tmp,$${TMPDIR:-/tmp},/dev/shm}/dpmon-$$UID-*/runs/*(NU/:t))
  _describe run runs
}

_dpmon_first() {
  local -a launchers
  [[ -n $$PREFIX ]] && launchers=('launchers:launcher:_command_names -e')
  _alternative 'scripts:script:_files -g "*.py"' 'commands:command:_shtab_dpmon_commands' $$launchers
}

_shtab_dpmon() {
  local context state state_descr line curcontext=$$curcontext options
  local -A opt_args
  if (( $${words[(i)-m]} < CURRENT - 1 )); then
    _default
    return
  fi
  _arguments -C -s -S $$_shtab_dpmon_options '(-)1: :_dpmon_first' '(-)*:: :->rest' && return
  [[ $$state == rest ]] || return
  case $$words[1] in
    $commands)
      options=_shtab_dpmon_$$words[1]_options
      _arguments -s $${(P)options}
      ;;
    *) _normal ;;
  esac
}
""")

_FISH = Template("""
function _dpmon_runs
  set -l state $$HOME/.local/state
  test -n "$$XDG_STATE_HOME"; and set state $$XDG_STATE_HOME
  set -l temporary /tmp
  test -n "$$TMPDIR"; and set temporary $$TMPDIR
  set -l places $$state/dpmon/runs {/var/tmp,$$temporary,/dev/shm}/dpmon-(id -u)-*/runs
  echo last
  command ls -- $$places 2>/dev/null | string match -r '^[0-9-]{16}[A-Za-z0-9._-]+$$'
end
""")
_FISH_END = """
# What follows the script's name belongs to the script.
function _shtab_dpmon_using
  _shtab_dpmon_scan
  if test -z "$argv"
    test -z "$_shtab_dpmon_cmdpath"; and test $_shtab_dpmon_npos -eq 0; and not _dpmon_module
    return
  end
  test "$_shtab_dpmon_cmdpath" = "$argv"
end

function _dpmon_module
  set -l tokens (commandline -opc)
  contains -- -m $tokens; and test "$tokens[-1]" != -m
end

function _dpmon_script
  _shtab_dpmon_scan
  test -z "$_shtab_dpmon_cmdpath"; and begin
    test $_shtab_dpmon_npos -gt 0; or _dpmon_module
  end
end

complete -c dpmon -n _shtab_dpmon_using -k -a '(__fish_complete_suffix .py)'
complete -c dpmon -n _dpmon_script -F
"""


def _all_commands() -> argparse.ArgumentParser:
    """A parser with all options and commands, which is not meant for parsing."""
    parser = run_parser()

    def made(prog: str) -> argparse.ArgumentParser:
        return command_parser(prog.split()[-1])

    # argparse accepts any callable as `parser_class`; only its type hints require a class.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="dpmon", parser_class=made)  # type: ignore[call-overload]
    for form, description in usage_lines():
        command = form.split()[1]
        if command in COMMANDS:
            commands.add_parser(command, help=description).usage = form
    return parser


def _completed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return `parser`, with the completion of each argument set for shtab."""
    runs = dict.fromkeys(("bash", "zsh"), "_dpmon_runs") | {"fish": "(_dpmon_runs)"}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _completed(command)
        elif action.metavar == "RUN":
            action.complete = runs  # type: ignore[attr-defined]
        elif action.metavar in ("FILE", "PYTHON"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "=FILE":
            action.nargs = 0  # its value is never the next word
    return parser


def _completion(shell: str) -> str:
    parser = _all_commands()
    commands = [form.split()[1] for form, _ in usage_lines() if form.split()[1].isalpha()]
    names = {"commands": " | ".join(commands), "valued": " | ".join(sorted(options_with_value(parser)))}
    before = {"zsh": _ZSH, "fish": _FISH}.get(shell, Template("")).substitute(names)
    after = {"bash": _BASH.substitute(names), "fish": _FISH_END}.get(shell, "")
    text = shtab.complete(_completed(parser), shell, preamble=before)
    # shtab's advice on where to put the file does not hold: it is installed with dpmon.
    text = re.sub(r"^# Usage:\n(#.*\n)+", "# Made by docs/shell/generate.py.\n", text, count=1, flags=re.MULTILINE)
    if shell == "zsh":
        text = text.replace('"(*):', '"*:')  # shtab completes the first word only of `RUN [RUN ...]`
    if shell == "bash":
        text = re.sub(r"^complete -o bashdefault .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines())).rstrip() + "\n" + after


def _man_page() -> str:
    parser = _all_commands()
    page = Manpage(
        parser,
        {
            "project_name": "dpmon",
            "version": dpmon.__version__,
            "manual_title": "User Commands",
            "description": "live terminal monitor for data-parallel PyTorch training",
            "date": " ",
        },
        format="single-commands-section",
    )
    forms = "\n.br\n".join(f".B {form}".replace("-", r"\-") for form, _ in usage_lines())
    page.add_section("synopsis", "=", forms)
    for heading, text in _SECTIONS.items():
        page.add_section(heading, "=", text)
    # --json=FILE is one word, and a long list of choices may be broken at its commas.
    text = str(page).replace(r" \fI\,[=", r"\fI\,[=")
    return re.sub(r"(?<=\{).*?(?=\})", lambda found: found[0].replace(",", r",\:"), text)


def generated() -> dict[str, str]:
    """The text of each file in this directory."""
    os.environ["COLUMNS"] = "100"  # argparse wraps lines at the terminal's width
    return {
        "dpmon.1": _man_page(),
        "dpmon": _completion("bash"),
        "_dpmon": _completion("zsh"),
        "dpmon.fish": _completion("fish"),
    }


if __name__ == "__main__":
    for name, text in generated().items():
        (PLACE / name).write_text(text, encoding="utf-8")
