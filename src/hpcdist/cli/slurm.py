"""The command ``slurm``: writes or submits a job script made from a template.

``python -m hpcdist slurm cpu --nodes 4 train.py``. The templates are the files in ``slurm/``, which can also be
submitted as they are. This command fills in the size of the job, the site's settings, the script and its arguments; the
options of a template are read from the template itself.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

from hpcdist.cli.job_arguments import wrapped

PACKAGED = Path(__file__).parent / "templates"  # in an installed wheel
CHECKOUT = Path(__file__).parents[3] / "slurm"  # in a checkout

# options of sbatch, each with a value, that can be set even if the template has no line for them
DIRECTIVES = (
    "account",
    "array",
    "constraint",
    "cpus-per-task",
    "dependency",
    "exclude",
    "gpus-per-node",
    "job-name",
    "mail-type",
    "mail-user",
    "mem",
    "mem-per-cpu",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
    "partition",
    "qos",
    "reservation",
    "signal",
    "time",
)
DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)(?:=(\S*))?.*$")
SETTING = re.compile(r'^: "\$\{HPCDIST_([A-Z_]+):?=(.*?)\}"\s*#\s*(.*)$')
START = "set -euo pipefail"


def folder() -> Path:
    """Return where the templates are: in the installed package, or in the checkout."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def templates() -> dict[str, Path]:
    """Return the templates by name."""
    return {path.stem: path for path in sorted(folder().glob("*.sbatch"))}


def template(name: str) -> str:
    """Return the text of a template file."""
    return (folder() / name).read_text()


def settings(template: str) -> dict[str, tuple[str, str]]:
    """Return the settings of a site: option -> its default and its meaning."""
    found = (SETTING.match(line) for line in template.splitlines())
    return {m[1].lower().replace("_", "-"): (m[2], m[3]) for m in found if m}


def parser_of(kind: str, template: str) -> argparse.ArgumentParser:
    """Build the parser of one template's options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m hpcdist slurm {kind}",
        usage=f"python -m hpcdist slurm {kind} [OPTION...] SCRIPT [ARGUMENT...]",
        description=template.splitlines()[1].lstrip("# "),
        allow_abbrev=False,
    )
    parser.add_argument("--write", metavar="FILE", help="write the job script to this file instead of the terminal")
    parser.add_argument("--submit", action="store_true", help="submit the job script with sbatch")
    here = {m[1]: m[2] for m in map(DIRECTIVE.match, template.splitlines()) if m}
    size = parser.add_argument_group("size of the job (options of sbatch)")
    for name in DIRECTIVES:
        size.add_argument(f"--{name}", help=f"default {here[name]}".replace("%", "%%") if name in here else None)
    site = parser.add_argument_group("settings of the site")
    for name, (default, meaning) in settings(template).items():
        # This Python has hpcdist, which the one on a compute node's PATH may not have.
        preset = sys.executable if name == "python" and kind != "apptainer" else None
        shown = f"{meaning} (default {preset or default})" if preset or default else meaning
        site.add_argument(f"--{name}", default=preset, help=shown.replace("%", "%%"))
    parser.add_argument("script", help="the Python script that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def fill(template: str, values: dict[str, str], script: list[str]) -> str:
    """Fill in a template.

    Args:
        template: the text of the template.
        values: option of sbatch or setting of the site -> its value.
        script: the script and its arguments.

    Returns:
        A job script. Arguments given to sbatch after it are appended to those of ``script``.

    Raises:
        ValueError: a value that sbatch cannot read from a line of the job script.
    """
    left = dict(values)
    lines: list[str] = []
    end_of_directives = 0
    for line in template.splitlines():
        if directive := DIRECTIVE.match(line):
            if (value := left.pop(directive[1], None)) is not None:
                line = directive_line(directive[1], value)
            end_of_directives = len(lines) + 1
        elif setting := SETTING.match(line):
            name = setting[1].lower().replace("_", "-")
            if (value := left.pop(name, None)) is not None:
                line = f"HPCDIST_{setting[1]}={shlex.quote(value)}"
        lines.append(line)
        if line == START:
            lines.append(f'set -- {shlex.join(script)} "$@"')
    lines[end_of_directives:end_of_directives] = [directive_line(name, value) for name, value in left.items()]
    return "\n".join(lines) + "\n"


def directive_line(name: str, value: str) -> str:
    """Return one ``#SBATCH`` line."""
    check_value(name, value)
    return f"#SBATCH --{name}={value}"


def check_value(name: str, value: str) -> None:
    """Raise for a value that cannot stand in a directive: sbatch ends it at white space and ``#``, and reads quotes."""
    if not value or re.search(r"[\s#'\"\\]", value):
        raise ValueError(
            f"--{name} {value!r} cannot be written to a job script; expected no spaces, quotes, '#' or backslash"
        )


def run(args: list[str]) -> int:
    """Run ``python -m hpcdist slurm``; return 0, or the exit status of sbatch, or 2 for wrong arguments."""
    known = templates()
    if not args or args[0] in {"-h", "--help"} or args[0] not in known:
        about = {name: path.read_text().splitlines()[1].lstrip("# ") for name, path in known.items()}
        lines = [wrapped(f"  {name:<10} {text}", " " * 13) for name, text in about.items()]
        usage = "usage: python -m hpcdist slurm TEMPLATE [OPTION...] SCRIPT [ARGUMENT...]\n\ntemplates:\n"
        more = "\n\noptions: python -m hpcdist slurm TEMPLATE --help"
        asked = bool(args) and args[0] in {"-h", "--help"}
        wrong = f"\nerror: no template {args[0]!r} (known: {', '.join(known)})" if args and not asked else ""
        print(usage + "\n".join(lines) + more + wrong, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    kind = args[0]
    template = known[kind].read_text()
    parser = parser_of(kind, template)
    try:
        options = vars(parser.parse_args(args[1:]))
    except SystemExit as ended:  # argparse has printed its help or the mistake
        return int(ended.code or 0)
    file, submit = options.pop("write"), options.pop("submit")
    script = [options.pop("script"), *options.pop("arguments")]
    values = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    try:
        filled = fill(template, values, script)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if file:
        Path(file).write_text(filled)
    elif not submit:
        sys.stdout.write(filled)
    return submit_job(["sbatch"], filled, file) if submit else 0


def submit_job(command: list[str], script: str, file: str | None = None) -> int:
    """Submit a job script, from its file if it has one, else on standard input; return the command's exit status."""
    whole = [*command, file] if file else command
    try:
        return subprocess.run(whole, input=None if file else script, text=True, check=False).returncode
    except FileNotFoundError:
        print(
            f"error: no {command[0]} on the PATH; run this on the cluster, or keep the job script in a file",
            file=sys.stderr,
        )
        return 1
