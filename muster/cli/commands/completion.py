"""`muster completion SHELL`: prints what completes commands and options of `muster` in a shell.

    source <(muster completion bash)            # in ~/.bashrc
    source <(muster completion zsh)             # in ~/.zshrc, after compinit
    muster completion fish > ~/.config/fish/completions/muster.fish

The scripts ask `muster completion apps` for the names of jobs. They are handwritten, because argparse has none and a
library would have to be installed beside muster.
"""

import os
from collections.abc import Collection, Mapping
from typing import Final

from muster.cli.commands import build_parser, list_parsers

_APPS: Final = "apps"
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
_ZSH = """\
_muster() {
    local -a found
    found=(@COMMANDS@)
    if (( CURRENT > 2 )); then
        case "${words[2]}" in
@CASES@
            *) found=() ;;
        esac
    fi
    compadd -- $found
}
compdef _muster muster
"""


def print_completion(shell: str) -> int:
    """Print the completion of a shell, or the names of jobs for it. Return the exit code."""
    if shell == _APPS:
        from muster.cli.handles import list_names

        print("\n".join(list_names(os.environ)))
    else:
        print(build_completion(shell), end="")
    return 0


def build_completion(shell: str) -> str:
    """Return the completion of "bash", "zsh" or "fish" as a text for that shell to read."""
    parsers = list_parsers(build_parser())
    words = {name: parser.list_words() for name, parser in parsers.items()}
    asks = [name for name, parser in parsers.items() if parser.names_app]
    if shell == "fish":
        return _build_fish(words, asks)
    names = " ".join(words)
    apps = f"$({_LIST_APPS})" if shell == "bash" else f'${{(f)"$({_LIST_APPS})"}}'
    rows = {name: " ".join([*found, *([apps] if name in asks else [])]) for name, found in words.items()}
    if shell == "bash":
        cases = "\n".join(f'            {name}) words="{row}" ;;' for name, row in rows.items())
        return _BASH.replace("@COMMANDS@", names).replace("@CASES@", cases)
    cases = "\n".join(f"            {name}) found=({row}) ;;" for name, row in rows.items())
    return _ZSH.replace("@COMMANDS@", names).replace("@CASES@", cases)


def _build_fish(words: Mapping[str, list[str]], asks: Collection[str]) -> str:
    lines = ["complete -c muster -f", f"complete -c muster -n __fish_use_subcommand -a '{' '.join(words)}'"]
    lines += [
        f"complete -c muster -n '__fish_seen_subcommand_from {name}' -a '{' '.join(found)}'"
        for name, found in words.items()
        if found
    ]
    lines += [f"complete -c muster -n '__fish_seen_subcommand_from {name}' -a '({_LIST_APPS})'" for name in asks]
    return "\n".join(lines) + "\n"
