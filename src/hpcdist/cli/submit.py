"""The command ``submit``: submits a script to Slurm, by a job template that it fills in.

``python -m hpcdist submit --nodes 4 train.py``. The templates are the files in ``slurm/``, which ``sbatch`` also takes
as they are. Options are sbatch's own and become lines of the job script, unchanged; only ``--template``, ``--dry-run``
and the settings of the template (``--python``, ``--mpi`` …) are not sbatch's.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from hpcdist.cli.job_arguments import description_of, wrap

PACKAGED = Path(__file__).parent / "templates"  # in an installed wheel
CHECKOUT = Path(__file__).parents[3] / "slurm"  # in a checkout
DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)(?:=(\S*))?.*$")
SETTING = re.compile(r'^: "\$\{HPCDIST_([A-Z_]+):?=(.*?)\}"\s*#\s*(.*)$')
START = "set -euo pipefail"

# options of sbatch(1) without a value, or with one only after "="; all others have a value
FLAGS = (
    "contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue overcommit oversubscribe parsable "
    "propagate quiet reboot requeue spread-job test-only use-min-nodes verbose wait"
)
# and its one-letter options
SHORT = (
    "A=account a=array b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error x=exclude G=gpus H=hold "
    "i=input J=job-name L=licenses M=clusters k=no-kill w=nodelist N=nodes n=ntasks o=output O=overcommit "
    "s=oversubscribe p=partition q=qos Q=quiet t=time v=verbose W=wait m=distribution S=core-spec B=extra-node-info"
)
LETTERS = dict(pair.split("=") for pair in SHORT.split())
# options for GPUs (gres may be for others); one that is given replaces the template's
GPUS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres")
# and these replace options that sbatch would refuse beside them, or add to them
REPLACED = {"ntasks-per-node": ("ntasks", "ntasks-per-gpu"), "cpus-per-task": ("cpus-per-gpu",)}
USAGE = "usage: python -m hpcdist submit [OPTION...] SCRIPT [ARGUMENT...]"
Options = dict[str, str | None]


def installed(name: str, folder: Path = CHECKOUT) -> Path:
    """Return a file of the installed package, or of the checkout."""
    return (PACKAGED if PACKAGED.is_dir() else folder) / name


def templates() -> dict[str, Path]:
    return {path.stem: path for path in sorted(installed("").glob("*.sbatch"))}


def settings(template: str) -> dict[str, tuple[str, str]]:
    found = (SETTING.match(line) for line in template.splitlines())
    return {m[1].lower().replace("_", "-"): (m[2], m[3]) for m in found if m}


def parse(args: list[str]) -> tuple[Options, list[str]]:
    """Return the options before the script, by long names, and the script with its arguments."""
    options: Options = {}
    rest = list(args)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
        else:
            value = word[2:].removeprefix("=")
            if (name := "help" if word == "-h" else LETTERS.get(word[1:2], "")) == "":
                raise ValueError(f"unknown option {word} (sbatch's letters: {', '.join(LETTERS)})")
            has_value = value
        if not has_value and name not in (*FLAGS.split(), "dry-run", "help"):
            if not rest:
                raise ValueError(f"--{name} has no value")
            value = rest.pop(0)
            has_value = "="
        options[name] = value if has_value else None
    return options, rest


def fill(template: str, options: Options, script: list[str]) -> str:
    """Return a template filled in with options of sbatch or settings (None for a flag), the script and its arguments.

    Arguments given to sbatch after the job script are appended to those of ``script``. A value that sbatch cannot read
    from a line of the job script is a ValueError.
    """
    left = with_ranks(options)
    lines: list[str] = []
    end_of_directives = 0
    for line in template.splitlines():
        if directive := DIRECTIVE.match(line):
            end_of_directives = len(lines) + 1
            if directive[1] in left:
                line = directive_line(directive[1], left.pop(directive[1]))
            elif (directive[1] in GPUS and asks_for_gpus(options)) or any(
                each in options for each in REPLACED.get(directive[1], ())
            ):
                end_of_directives -= 1
                continue
        elif setting := SETTING.match(line):
            name = setting[1].lower().replace("_", "-")
            if (value := left.pop(name, None)) is not None:
                line = f"HPCDIST_{setting[1]}={shlex.quote(value)}"
        lines.append(line)
        if line == START:
            lines.append(f'set -- {shlex.join(script)} "$@"')
    lines[end_of_directives:end_of_directives] = [directive_line(*each) for each in left.items()]
    return "\n".join(lines) + "\n"


def asks_for_gpus(options: Options) -> bool:
    return any(name in GPUS and (name != "gres" or "gpu" in (value or "")) for name, value in options.items())


def with_ranks(options: Options) -> Options:
    """Return options with one rank for each GPU of a node, if they count GPUs and no ranks."""
    asked = options.get("gpus-per-node") or options.get("gres") or ""
    count = re.fullmatch(r"(?:[a-z][\w.-]*:)*(\d+)", asked)
    counts_ranks = any(name in options for name in ("ntasks", "ntasks-per-node", "ntasks-per-gpu"))
    if count is None or counts_ranks or not asks_for_gpus(options):
        return dict(options)
    return options | {"ntasks-per-node": count[1]}


def directive_line(name: str, value: str | None) -> str:
    """Return one ``#SBATCH`` line; sbatch ends a value at a space, a quote or ``#`` that is not in quotes."""
    if value is None:
        return f"#SBATCH --{name}"
    if not value or re.search(r'[^\S ]|["\\]', value):
        raise ValueError(
            f"--{name} {value!r} cannot be written to a job script; expected one line without '\"' and backslash"
        )
    return f'#SBATCH --{name}="{value}"' if re.search("[ #']", value) else f"#SBATCH --{name}={value}"


def usage(name: str, template: str) -> str:
    texts = {each: path.read_text(encoding="utf-8") for each, path in templates().items()}
    about = {each: text.splitlines()[1].lstrip("# ") for each, text in texts.items()}
    found = settings(template)
    if "image" not in found:  # its Python is the container's
        found["python"] = (sys.executable, "the Python that has hpcdist")
    own = {
        "template NAME": f"the kind of job ({name})",
        "dry-run": "print the job script instead of submitting it",
        **{each: f"{meaning} ({default})" if default else meaning for each, (default, meaning) in found.items()},
    }
    return "\n".join(
        [
            *(USAGE, "", wrap(description_of(__doc__).replace("\n", " ")), "", "templates:"),
            *(wrap(f"  {each:<10} {text}", " " * 13) for each, text in about.items()),
            *("", f"options beside sbatch's, with the template {name}:"),
            *(wrap(f"  --{each:<16} {text}", " " * 21) for each, text in own.items()),
        ]
    )


def run(args: list[str]) -> int:
    """Run ``python -m hpcdist submit``; return 0, or the exit status of sbatch, or 2 for wrong arguments."""
    try:
        options, script = parse(args)
        name = options.pop("template", None) or ("gpu" if asks_for_gpus(options) else "cpu")
        if name not in templates():
            raise ValueError(f"no template {name!r} (known: {', '.join(templates())})")
        template = templates()[name].read_text(encoding="utf-8")
        if "help" in options:
            print(usage(name, template))
            return 0
        if not script:
            raise ValueError("no script to run")
        is_dry = "dry-run" in options
        options.pop("dry-run", None)
        if "image" not in settings(template):
            options.setdefault("python", sys.executable)
        filled = fill(template, options, script)
    except ValueError as error:
        print(f"{USAGE}\nerror: {error}; options: python -m hpcdist submit --help", file=sys.stderr)
        return 2
    if is_dry:
        if isinstance(sys.stdout, io.TextIOWrapper):  # names of files are any bytes
            sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
        sys.stdout.write(filled)
        return 0
    try:
        return subprocess.run(["sbatch"], input=os.fsencode(filled), check=False).returncode
    except FileNotFoundError:
        print("error: no sbatch on the PATH; run this on the cluster, or keep the script (--dry-run)", file=sys.stderr)
        return 1
