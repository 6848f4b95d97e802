"""The command ``completion``: prints the script by which a shell completes the words of ``hpcdist``.

``hpcdist completion bash > ~/.local/share/bash-completion/completions/hpcdist``; ``zsh`` and ``fish`` likewise. The
script is made from the commands' own parsers and starts no Python, so that a word is completed at once; write it again
after an upgrade.
"""

from __future__ import annotations

import argparse

from hpcdist.cli import explain, submit
from hpcdist.cli.job_arguments import JobParser
from hpcdist.cli.main import COMMANDS, module_of


def parser() -> JobParser:
    made = JobParser("completion", __doc__)
    made.add_argument("shell", choices=SCRIPTS, help="whose script is printed")
    return made


def words(command: str) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Return the words after a command: its options, its other arguments (files, if empty), and an option's values."""
    if command == "submit":  # its options are sbatch's
        settings = {
            each for path in submit.templates().values() for each in submit.settings(path.read_text(encoding="utf-8"))
        }
        names = {"template", "dry-run", "help", *submit.FLAGS.split(), *submit.LETTERS.values(), *submit.GPUS}
        return [f"--{each}" for each in sorted(names | settings)], [], {"--template": [*submit.templates()]}
    actions: list[argparse.Action] = module_of(command).parser()._actions
    options = [each for action in actions for each in action.option_strings]
    values = {each: [*action.choices] for action in actions if action.choices for each in action.option_strings}
    others = [each for action in actions if action.choices and not action.option_strings for each in action.choices]
    return options, [*explain.entries()] if command == "explain" else others, values


def bash() -> str:
    cases = []
    for command in COMMANDS:
        options, others, values = words(command)
        cases += [f'    *:{command}:{option}:*) words="{" ".join(found)}" ;;' for option, found in values.items()]
        cases.append(f'    *:{command}:*:-*) words="{" ".join(options)}" ;;')
        cases += [f'    *:{command}:{command}:*) words="{" ".join(others)}" ;;'] * bool(others)
    return "\n".join(
        [
            "_hpcdist() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" words=""',
            '  case "$COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]}:$word" in',
            f'    1:*) words="{" ".join([*COMMANDS, "--help", "--version"])}" ;;',
            *cases,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _hpcdist hpcdist",
        ]
    )


def zsh() -> str:
    """Return zsh's script: zsh can read bash's."""
    return "\n".join(["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit", bash()])


def fish() -> str:
    lines = []
    for command, summary in COMMANDS.items():
        options, others, values = words(command)
        follows = f"complete -c hpcdist -n '__fish_seen_subcommand_from {command}'"
        lines.append(f'complete -c hpcdist -f -n __fish_use_subcommand -a {command} -d "{summary}"')
        lines += [f"{follows} -f -a '{' '.join(others)}'"] * bool(others)
        for option in options:
            kind = "l" if option.startswith("--") else "s"
            taken = f" -x -a '{' '.join(values[option])}'" if option in values else ""
            lines.append(f"{follows} -{kind} {option.lstrip('-')}{taken}")
    return "\n".join(lines)


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def run(args: list[str]) -> int:
    print(SCRIPTS[parser().parse_args(args).shell]())
    return 0
