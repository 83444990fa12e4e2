"""Completion for bash, zsh and fish: shtab writes it from the parser, so it knows every option.

What shtab does not know is what `--set` takes, a setting and its value: that is added here.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import shtab

from thinwire.codec.config import PLAIN
from thinwire.settings import Settings

_SETTINGS = "_thinwire_settings"

# Bash splits words at "=", unless COMP_WORDBREAKS lacks it; then only what follows is replaced.
_BASH = """
_thinwire() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" word
    word="$cur"
    if [[ $cur == "=" ]]; then word="$prev="; cur=""; fi
    if [[ $prev == "=" ]]; then word="${{COMP_WORDS[COMP_CWORD-2]}}=$cur"; fi
    if [[ $word == *.*=* ]]; then
        COMPREPLY=($(compgen -W "{values}" -- "$word"))
        if [[ $word != "$cur" ]]; then COMPREPLY=("${{COMPREPLY[@]#*=}}"); fi
    elif [[ $prev == --set ]]; then
        compopt -o nospace 2>/dev/null
        COMPREPLY=($(compgen -W "{names}" -- "$cur"))
    else
        _shtab_thinwire
    fi
}}
complete -o default -F _thinwire thinwire
"""
_ZSH = """
_thinwire_settings() {{
    if [[ $PREFIX == *=* ]]; then
        compadd -- {values} || {{ compset -P '*='; _files; }}
    else
        compadd -S '' -- {names}
    fi
}}
"""
_FISH = "set -g _thinwire_settings {names} {values}"


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script to source (bash, zsh) or to put among fish's completions."""
    names, values = map(" ".join, _setting_words())
    words = {"names": names, "values": values}
    added = {"zsh": _ZSH.format(**words), "fish": _FISH.format(**words)}
    settings = {"zsh": _SETTINGS, "fish": f"${_SETTINGS}", "preamble": added}
    for option in _options(parser):
        if "--set" in option.option_strings:
            option.complete = settings  # type: ignore[attr-defined]
        elif option.type is Path:
            option.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell)
    if shell == "bash":
        return script + _BASH.format(**words)
    # zsh: also where the script is sourced, and not only where it is evaluated.
    return script.replace("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)")


def _setting_words() -> tuple[list[str], list[str]]:
    """What `--set` takes: every `section.key=`, and that with each value where a few are known."""
    names, values = [], []
    for section, cls in typing.get_type_hints(Settings).items():
        kinds = typing.get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            known = ("true", "false") if kinds[entry.name] is bool else entry.metadata["choices"]
            if section == "codec" and kinds[entry.name] is str:
                known = PLAIN
            names.append(f"{section}.{entry.name}=")
            values += [names[-1] + value for value in known]
    return names, values


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
