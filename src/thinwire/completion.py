"""Completion for bash, zsh and fish, written from the parser itself: it knows every option."""

import argparse
import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.settings import Settings

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class _Option:
    """An option of a command: how it is written, and what may follow it."""

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True)
class _Command:
    """A command by the words that lead to it, none for `thinwire` itself."""

    path: tuple[str, ...]
    help: dict[str, str]  # of the commands below it
    options: list[_Option]
    words: list[str]  # that may stand by themselves


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script to source (bash, zsh) or to put among fish's completions."""
    commands = list(_commands(parser, ()))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


def setting_names() -> tuple[str, ...]:
    """What `--set` takes: every `section.key=`."""
    settings = Settings()
    return tuple(
        f"{section.name}.{key.name}="
        for section in dataclasses.fields(settings)
        for key in dataclasses.fields(getattr(settings, section.name))
    )


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[_Command]:
    below: dict[str, argparse.ArgumentParser] = {}
    help: dict[str, str] = {}
    options: list[_Option] = []
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below.update(action.choices)
            help |= {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            values = tuple(map(str, action.choices or ()))
            if "--set" in action.option_strings:
                values = setting_names()
            flags, takes_value = tuple(action.option_strings), action.nargs != 0
            options.append(_Option(flags, action.help or "", takes_value, values))
        else:
            words += map(str, action.choices or ())
    yield _Command(path, {name: help.get(name, "") for name in below}, options, words)
    for name, inner in below.items():
        yield from _commands(inner, (*path, name))


def _steps(commands: list[_Command]) -> str:
    """Lines of a `case` that follow the words typed so far to the command they name."""
    return "\n".join(
        f'            "{" ".join(command.path)}|{name}") at="{" ".join((*command.path, name))}";;'
        for command in commands
        for name in command.help
    )


def _values(commands: list[_Command], add: str, add_setting: str) -> str:
    """Lines of a `case` that offer what may follow an option."""
    places: dict[tuple[str, ...], list[str]] = {}
    for command in commands:
        for option in command.options:
            keys = [f'"{" ".join(command.path)}|{flag}"' for flag in option.flags]
            places.setdefault(option.values, []).extend(keys if option.values else [])
    lines = []
    for values, keys in places.items():
        if keys:
            how = add_setting if values[0].endswith("=") else add
            lines.append(f"        {'|'.join(keys)}) {how.format(' '.join(values))}; return;;")
    return "\n".join(lines)


def _words(commands: list[_Command], add: str) -> str:
    """Lines of a `case` that offer the commands and options at a place."""
    lines = []
    for command in commands:
        flags = [flag for option in command.options for flag in option.flags]
        words = " ".join([*command.help, *command.words, *flags])
        lines.append(f'        "{" ".join(command.path)}") {add.format(words)};;')
    return "\n".join(lines)


def _bash(commands: list[_Command]) -> str:
    reply = 'COMPREPLY=($(compgen -W "{}" -- "$cur"))'
    return f"""\
# bash completion of thinwire; to use it: source <(thinwire completion bash)
_thinwire() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" at="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$at|$word" in
{_steps(commands)}
        esac
    done
    case "$at|$prev" in
{_values(commands, reply, "compopt -o nospace 2>/dev/null; " + reply)}
    esac
    case "$at" in
{_words(commands, reply)}
    esac
}}
complete -o default -F _thinwire thinwire
"""


def _zsh(commands: list[_Command]) -> str:
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
{_values(commands, "compadd -- {}", "compadd -S '' -- {}")}
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
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.path]
        here = "; and ".join(seen) or "true"
        below = " ".join(command.help)
        open_place = f"not __fish_seen_subcommand_from {below}"
        where = f"{'; and '.join([*seen, open_place])}" if below else here
        for name, help in command.help.items():
            lines.append(
                f"complete -c thinwire -f -n {_quoted(where)} -a {name} -d {_quoted(help)}"
            )
        for option in command.options:
            names = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                for flag in option.flags
            )
            value = f" -x -a {_quoted(' '.join(option.values))}" if option.values else ""
            if option.takes_value and not value:
                value = " -r"
            described = f"-d {_quoted(option.help)}"
            lines.append(f"complete -c thinwire -n {_quoted(where)} {names}{value} {described}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return shlex.quote(text.replace("%%", "%").replace("'", "’"))
