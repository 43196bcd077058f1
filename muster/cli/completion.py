"""`muster completion SHELL`: prints what completes commands and options of `muster` in a shell.

    source <(muster completion bash)            # in ~/.bashrc
    source <(muster completion zsh)             # in ~/.zshrc, after compinit
    muster completion fish > ~/.config/fish/completions/muster.fish

The scripts ask `muster completion apps` for the names of jobs. They are handwritten, because argparse has none and a
library would have to be installed beside muster.
"""

import argparse
import os
from collections.abc import Collection, Mapping
from typing import Final

APPS: Final = "apps"
_LIST_APPS = "muster completion apps 2>/dev/null"
_BASH = """\
_muster() {
    local word="${COMP_WORDS[COMP_CWORD]}" words="@COMMANDS@"
    if (( COMP_CWORD > 1 )); then
        case "${COMP_WORDS[1]}" in
@CASES@
            *) words="" ;;
        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
}
complete -F _muster muster
"""


def write_completion(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the completion of a shell, and return the exit code."""
    if shell == APPS:
        from muster.cli.handles import list_names

        print("\n".join(list_names(os.environ)))
    else:
        print(build_completion(shell, parser), end="")
    return 0


def build_completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion of "bash", "zsh" or "fish" as a text for that shell to read."""
    options = list_options(parser)
    asks = _list_asking(parser)
    if shell == "fish":
        return _build_fish(options, asks)
    if shell == "bash":
        for name in asks:
            options[name].append(f"$({_LIST_APPS})")
        cases = "\n".join(f'            {name}) words="{" ".join(words)}" ;;' for name, words in options.items())
        return _BASH.replace("@COMMANDS@", " ".join(options)).replace("@CASES@", cases)
    found = {
        name: [*words, *([f'${{(f)"$({_LIST_APPS})"}}'] if name in asks else [])] for name, words in options.items()
    }
    cases = "\n".join(f"            {name}) found=({' '.join(words)}) ;;" for name, words in found.items())
    return f"""\
_muster() {{
    local -a found
    found=({" ".join(options)})
    if (( CURRENT > 2 )); then
        case "${{words[2]}}" in
{cases}
            *) found=() ;;
        esac
    fi
    compadd -- $found
}}
compdef _muster muster
"""


def _build_fish(options: Mapping[str, list[str]], asks: Collection[str]) -> str:
    lines = ["complete -c muster -f", f"complete -c muster -n __fish_use_subcommand -a '{' '.join(options)}'"]
    lines += [
        f"complete -c muster -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'"
        for name, words in options.items()
        if words
    ]
    lines += [f"complete -c muster -n '__fish_seen_subcommand_from {name}' -a '({_LIST_APPS})'" for name in asks]
    return "\n".join(lines) + "\n"


def list_options(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the words that may follow each command: options, and values that are one of few."""
    found: dict[str, list[str]] = {}
    for name, command in list_commands(parser).items():
        words: list[str] = []
        for action in command._actions:  # noqa: SLF001
            words += [word for word in action.option_strings if word.startswith("--")] or list(action.choices or ())
        found[name] = words
    return found


def _list_asking(parser: argparse.ArgumentParser) -> list[str]:
    """Return the commands that name an app."""
    return [
        name
        for name, command in list_commands(parser).items()
        if any(action.dest == "handle" for action in command._actions)  # noqa: SLF001
    ]


def list_commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    return next(
        action.choices
        for action in parser._actions  # noqa: SLF001  # argparse has no other way to list them
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )
