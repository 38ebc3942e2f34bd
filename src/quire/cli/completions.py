"""Print a shell script that completes commands, options and values.

bash: quire completions bash > ~/.local/share/bash-completion/completions/quire
zsh:  quire completions zsh > a file _quire in a folder of $fpath
fish: quire completions fish > ~/.config/fish/completions/quire.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from quire.records import dataclass

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Option:
    """An option as a shell completes it: its flags, its help text and its values."""

    flags: tuple[str, ...]
    text: str
    takes_value: bool
    choices: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](), end="")
    return 0


def commands() -> dict[str, str]:
    """Commands as they are typed, including those of `quire bench`, with their help."""
    from quire.cli.bench import BENCHES
    from quire.cli.main import COMMANDS

    return {name: text for name, (_, text) in COMMANDS.items()} | {
        f"bench {name}": text for name, (_, text) in BENCHES.items()
    }


def options(command: str) -> Iterator[Option]:
    """Yield the options of a command that its help shows."""
    from quire.cli.bench import bench_parser
    from quire.cli.main import command_parser

    name, _, bench = command.partition(" ")
    parser = bench_parser(bench) if bench else command_parser(name)
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            text = (action.help or "").replace("%%", "%").partition(";")[0].partition(" (default")[0]
            choices = tuple(map(str, action.choices or ()))
            yield Option(tuple(action.option_strings), text, action.nargs != 0, choices)


def _own_words(command: str) -> list[str]:
    """Return the words that may follow a command, besides options and files."""
    if command == "completions":
        return list(SHELLS)
    prefix = f"{command} "
    return [name.removeprefix(prefix) for name in commands() if name.startswith(prefix)]


def _bash() -> str:
    top = [name for name in commands() if " " not in name]
    flags, values = [], []
    for command in commands():
        found = list(options(command))
        words = [*_own_words(command), *(flag for option in found for flag in option.flags)]
        flags.append(f'        "{command}") words="{" ".join(words)}" ;;')
        for option in found:
            spelled = " | ".join(f'"{command} {flag}"' for flag in option.flags)
            if option.choices:
                values.append(f'        {spelled}) words="{" ".join(option.choices)}" ;;')
            elif option.takes_value:
                values.append(f"        {spelled}) files=1 ;;")
    return f"""# bash completion of quire, made by: quire completions bash
_quire() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command words files
    command=${{COMP_WORDS[1]}}
    [[ $command == bench && $COMP_CWORD -gt 2 ]] && command="bench ${{COMP_WORDS[2]}}"
    [[ $COMP_CWORD -eq 1 || $command == help ]] && command=help
    case "$command $before" in
{chr(10).join(values)}
    esac
    [[ -z $words && -z $files ]] && case "$command" in
        help) words="{" ".join([*top, "help", "--help", "--version"])}" ;;
{chr(10).join(flags)}
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    [[ -z $words || ($current != -* && $command != help) ]] && mapfile -t -O ${{#COMPREPLY[@]}} COMPREPLY < <(
        compgen -f -- "$current")
}}
complete -o filenames -F _quire quire
"""


def _zsh() -> str:
    listed = "\n".join(
        f"    {_quoted(f'{name}:{text}')}" for name, text in commands().items() if " " not in name
    )
    cases = []
    for command in commands():
        specs = []
        for option in options(command):
            group = f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
            what = f"({' '.join(option.choices)})" if option.choices else "_files"
            for flag in option.flags:
                text = (
                    option.text.replace("\\", "\\\\")
                    .replace("]", "\\]")
                    .replace("[", "\\[")
                    .replace(":", "\\:")
                )
                value = f":value:{what}" if option.takes_value else ""
                specs.append(f"            {_quoted(f'{group}{flag}[{text}]{value}')}")
        words = _own_words(command)
        rest = f"'1:what:({' '.join(words)})' '*:file:_files'" if words else "'*:file:_files'"
        body = " \\\n".join(["        _arguments", *specs, f"            {rest}"])
        cases.append(f"    {_quoted(command)})\n{body}\n        ;;")
    return f"""#compdef quire
# zsh completion of quire, made by: quire completions zsh
local -a commands
commands=(
{listed}
    'help:explain a command'
)
if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then
    _describe command commands
    return
fi
local command=$words[2]
shift words
(( CURRENT-- ))
if [[ $command == bench ]] && (( CURRENT > 2 )); then
    command="bench $words[2]"
    shift words
    (( CURRENT-- ))
fi
case $command in
{chr(10).join(cases)}
esac
"""


def _fish() -> str:
    found = commands()
    top = [name for name in found if " " not in name]
    lines = ["# fish completion of quire, made by: quire completions fish"]
    lines += [
        f"complete -c quire -n __fish_use_subcommand -f -a {name} -d {_quoted(found[name])}" for name in top
    ]
    lines.append("complete -c quire -n __fish_use_subcommand -f -a help -d 'explain a command'")
    lines.append(f"complete -c quire -n '__fish_seen_subcommand_from help' -f -a {_quoted(' '.join(top))}")
    for command in found:
        name, _, bench = command.partition(" ")
        where = f"__fish_seen_subcommand_from {name}"
        where += f"; and __fish_seen_subcommand_from {bench}" if bench else ""
        words = _own_words(command)
        if words:
            lines.append(
                f"complete -c quire -n '{where}; and not __fish_seen_subcommand_from {' '.join(words)}' -f "
                f"-a {_quoted(' '.join(words))}"
            )
        for option in options(command):
            spelled = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-{'s' if len(flag) == 2 else 'o'} {flag[1:]}"
                for flag in option.flags
            )
            value = (
                f" -x -a {_quoted(' '.join(option.choices))}"
                if option.choices
                else " -r" * option.takes_value
            )
            lines.append(f"complete -c quire -n '{where}' {spelled}{value} -d {_quoted(option.text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Quote a word for a shell, without inner quotes: zsh and fish read them differently."""
    return "'" + text.replace("'", "’") + "'"
