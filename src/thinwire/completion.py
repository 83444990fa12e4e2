"""Completion for bash, zsh and fish, written from the parser itself: it knows every option."""

import argparse
import dataclasses
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.codec.config import PLAIN
from thinwire.settings import Settings

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class _Command:
    """A command by the words that lead to it, none for `thinwire` itself."""

    path: str
    below: dict[str, str]  # the commands below it, and what they are for
    words: list[str]  # that may stand by themselves
    options: list[argparse.Action]

    @property
    def flags(self) -> list[str]:
        """Every way to write one of its options."""
        return [flag for option in self.options for flag in option.option_strings]


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script to source (bash, zsh) or to put among fish's completions."""
    commands = list(_commands(parser, ""))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def setting_names() -> tuple[str, ...]:
    """What `--set` takes: every `section.key=`."""
    sections = Settings().to_plain()
    return tuple(f"{section}.{key}=" for section, keys in sections.items() for key in keys)


def setting_values() -> Iterator[str]:
    """`section.key=value` for each value of a setting that has few, or is known by name."""
    for section, cls in typing.get_type_hints(Settings).items():
        kinds = typing.get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            known = ("true", "false") if kinds[entry.name] is bool else entry.metadata["choices"]
            if section == "codec" and kinds[entry.name] is str:
                known = PLAIN
            yield from (f"{section}.{entry.name}={value}" for value in known)


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    command = _Command(path, {}, [], [])
    inner: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = dict(action.choices)
            command.below.update(dict.fromkeys(inner, ""))
            command.below.update({c.dest: c.help or "" for c in action._choices_actions})
        elif action.option_strings:
            command.options.append(action)
        else:
            command.words.extend(map(str, action.choices or ()))
    yield command
    for name, below in inner.items():
        yield from _commands(below, f"{path} {name}".strip())


def _values(option: argparse.Action) -> tuple[str, ...]:
    """What may follow an option, as far as it is known."""
    return setting_names() if "--set" in option.option_strings else tuple(option.choices or ())


def _steps(commands: list[_Command]) -> str:
    """Lines of a `case` that follow the words typed so far to the command they name."""
    return "\n".join(
        f'            "{command.path}|{name}") at="{f"{command.path} {name}".strip()}";;'
        for command in commands
        for name in command.below
    )


def _offers(commands: list[_Command], add: str, add_setting: str) -> str:
    """Lines of a `case` that offer what may follow an option."""
    places: dict[tuple[str, ...], list[str]] = {}
    for command in commands:
        for option in command.options:
            keys = [f'"{command.path}|{flag}"' for flag in option.option_strings]
            places.setdefault(_values(option), []).extend(keys)
    places.pop((), None)
    return "\n".join(
        f"        {'|'.join(keys)}) "
        f"{(add_setting if values[0].endswith('=') else add).format(' '.join(values))}; return;;"
        for values, keys in places.items()
    )


def _words(commands: list[_Command], add: str) -> str:
    """Lines of a `case` that offer the commands and options at a place."""
    return "\n".join(
        f'        "{command.path}") '
        f"{add.format(' '.join([*command.below, *command.words, *command.flags]))};;"
        for command in commands
    )


def _bash(commands: list[_Command]) -> str:
    reply = 'COMPREPLY=($(compgen -W "{}" -- "$cur"))'
    # Bash splits words at "=", unless COMP_WORDBREAKS lacks it; then only what follows is replaced.
    return f"""\
# bash completion of thinwire; to use it: source <(thinwire completion bash)
_thinwire() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" at="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$at|$word" in
{_steps(commands)}
        esac
    done
    word="$cur"
    if [[ $cur == "=" ]]; then word="$prev="; cur=""; fi
    if [[ $prev == "=" ]]; then word="${{COMP_WORDS[COMP_CWORD-2]}}=$cur"; fi
    if [[ $word == *.*=* ]]; then
        COMPREPLY=($(compgen -W "{" ".join(setting_values())}" -- "$word"))
        if [[ $word != "$cur" ]]; then COMPREPLY=("${{COMPREPLY[@]#*=}}"); fi
        return
    fi
    case "$at|$prev" in
{_offers(commands, reply, "compopt -o nospace 2>/dev/null; " + reply)}
    esac
    case "$at" in
{_words(commands, reply)}
    esac
}}
complete -o default -F _thinwire thinwire
"""


def _zsh(commands: list[_Command]) -> str:
    values = f"compadd -- {' '.join(setting_values())} || {{{{ compset -P '*='; _files; }}}}"
    setting = f"if [[ $PREFIX == *=* ]]; then {values}; else compadd -S '' -- {{}}; fi"
    return f"""\
#compdef thinwire
# zsh completion of thinwire; to use it: source <(thinwire completion zsh)
_thinwire() {{
    local at="" word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$at|$word" in
{_steps(commands)}
        esac
    done
    case "$at|${{words[CURRENT-1]}}" in
{_offers(commands, "compadd -- {}", setting)}
    esac
    case "$at" in
{_words(commands, "compadd -- {}")}
    esac
    _files
}}
compdef _thinwire thinwire
"""


def _fish(commands: list[_Command]) -> str:
    lines = ["# fish completion of thinwire: thinwire completion fish | source"]
    for command in commands:
        conditions = [f"__fish_seen_subcommand_from {word}" for word in command.path.split()]
        if command.below:
            conditions.append(f"not __fish_seen_subcommand_from {' '.join(command.below)}")
        start = f"complete -c thinwire {{}}-n {_quoted('; and '.join(conditions) or 'true')}"
        for name, help in command.below.items():
            lines.append(f"{start.format('-f ')} -a {name} -d {_quoted(help)}")
        for option in command.options:
            names = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                for flag in option.option_strings
            )
            value = "" if option.nargs == 0 else " -r"
            if values := _values(option):
                more = setting_values() if "--set" in option.option_strings else ()
                value = f" -x -a {_quoted(' '.join([*values, *more]))}"
            lines.append(f"{start.format('')} {names}{value} -d {_quoted(option.help or '')}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return shlex.quote(text.replace("%%", "%").replace("'", "’"))
