"""Parts that are the same in every job template: `python slurm/parts.py` writes them into the templates.

A job script has to be one file, because Slurm copies it before it runs it. So each part stands in every
template, from the comment that names it to the next empty line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
TITLE = "# {}, the same in every template (slurm/parts.py):\n"
ENVIRONMENT = """\
# What `sbatch --export=` would keep from the ranks, and what is left of the step in whose shell sbatch was typed.
unset SLURM_EXPORT_ENV SLURM_STEP_ID SLURM_STEPID PMI_RANK PMI_SIZE PMI_FD PMIX_NAMESPACE PMIX_RANK "${!PMIX_SERVER_@}"
if [[ -n "$HPCDIST_MODULES" ]]; then
    read -ra modules <<< "$HPCDIST_MODULES"
    set +u  # module is a function of the site's, which may read unset variables
    module load "${modules[@]}"
    set -u
fi
cpus="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_GPU:-1}}"  # of a rank, which has one GPU if CPUs are counted by GPU
"""
END = """\
echo "job $SLURM_JOB_ID ended $(date -Is) with status $status"
exit "$status"
"""


def templates() -> list[Path]:
    """Return the files of all templates."""
    return sorted(FOLDER.glob("*.sbatch"))


def written(path: Path) -> str:
    """Return what a template should hold: its own text with the parts as they are now."""
    text = path.read_text()
    for name, part in {"environment": ENVIRONMENT, "end": END}.items():
        title = TITLE.format(name)
        if title not in text:
            raise ValueError(f"{path.name} has no line {title.strip()!r}")
        text = re.sub(re.escape(title) + r"(?:.+\n)*", lambda _, new=title + part: new, text)
    return text


if __name__ == "__main__":
    wrong = [path for path in templates() if written(path) != path.read_text()]
    for path in wrong:
        path.write_text(written(path))
    print("written:", ", ".join(path.name for path in wrong) or "nothing", file=sys.stderr)
