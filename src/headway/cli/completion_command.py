"""`headway completion`: a script that completes commands, options and keys of the configuration in a shell.

source <(headway completion bash)                  in ~/.bashrc; zsh: in ~/.zshrc
headway completion fish > ~/.config/fish/completions/headway.fish
"""

import argparse
from collections.abc import Mapping

from headway.config.field_types import iterate_options
from headway.config.schema import Config

HELP = "print a script that completes in your shell"
_BASH = """_headway() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=""
  compopt +o nospace 2>/dev/null
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    case ${{COMP_WORDS[1]}}/$current in
      {overridden}/[a-z]*) words="$words {keys}"; compopt -o nospace 2>/dev/null ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _headway headway
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run_command(args: argparse.Namespace) -> int:
    """Print the script."""
    from headway.cli import make_parser  # it imports every command, this one included

    commands = _find_commands(make_parser())
    keys = [f"{option.key}=" for option in iterate_options(Config) if "<" not in option.key and "[" not in option.key]
    print(_make_fish_script(commands, keys) if args.shell == "fish" else _make_bash_script(commands, keys, args.shell))
    return 0


def _find_commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    (found,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def _list_words(command: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command, and the names that its arguments may have."""
    words = [word for action in command._actions for word in action.option_strings if word.startswith("--")]
    return words + [str(choice) for action in command._actions for choice in action.choices or ()]


def _takes_overrides(command: argparse.ArgumentParser) -> bool:
    return any("key=value" in str(action.metavar) for action in command._actions)


def _make_bash_script(commands: Mapping[str, argparse.ArgumentParser], keys: list[str], shell: str) -> str:
    cases = "\n".join(f'      {name}) words="{" ".join(_list_words(one))}" ;;' for name, one in commands.items())
    overridden = "|".join(name for name, one in commands.items() if _takes_overrides(one))
    words = {"commands": " ".join(commands), "cases": cases, "overridden": f"@({overridden})", "keys": " ".join(keys)}
    return (_ZSH if shell == "zsh" else "shopt -s extglob\n") + _BASH.format(**words)


def _make_fish_script(commands: Mapping[str, argparse.ArgumentParser], keys: list[str]) -> str:
    from headway.cli import COMMANDS

    lines = []
    for name, command in commands.items():
        lines.append(f"complete -c headway -n __fish_use_subcommand -a {name} -d '{COMMANDS[name].HELP}'")
        seen = f"complete -c headway -n '__fish_seen_subcommand_from {name}'"
        for word in _list_words(command):
            lines.append(f"{seen} -l {word[2:]}" if word.startswith("--") else f"{seen} -a {word}")
        if _takes_overrides(command):
            lines.append(f"{seen} -a '{' '.join(keys)}'")
    return "\n".join(lines)
