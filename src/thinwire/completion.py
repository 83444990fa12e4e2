"""Completion for bash, zsh and fish: shtab writes it from the parser, so it knows every option.

What shtab does not know are the settings that `--set` takes: these are added here.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from thinwire.settings import Settings

_SETTINGS = "_thinwire_settings"

# A value follows behind the "=" of a setting: no space comes between.
_BASH = """
_thinwire() {{
    if [[ ${{COMP_WORDS[COMP_CWORD-1]}} == --set ]]; then
        compopt -o nospace 2>/dev/null
        COMPREPLY=($(compgen -W "{names}" -- "${{COMP_WORDS[COMP_CWORD]}}"))
    else
        _shtab_thinwire
    fi
}}
complete -o default -F _thinwire thinwire
"""
_ZSH = "_thinwire_settings() {{ compadd -S '' -- {names}; }}"


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script to source (bash, zsh) or to put among fish's completions."""
    sections = Settings().to_plain().items()
    names = " ".join(f"{section}.{key}=" for section, keys in sections for key in keys)
    added = {"zsh": _ZSH.format(names=names), "fish": f"set -g {_SETTINGS} {names}"}
    settings = {"zsh": _SETTINGS, "fish": f"${_SETTINGS}", "preamble": added}
    for option in _options(parser):
        if "--set" in option.option_strings:
            option.complete = settings  # type: ignore[attr-defined]
        elif option.type is Path:
            option.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell)
    if shell == "bash":
        return script + _BASH.format(names=names)
    # zsh: also where the script is sourced, and not only where it is evaluated.
    return script.replace("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)")


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
