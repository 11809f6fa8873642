"""Find the commit of the running code, for the records of runs and results."""

import json
import os
import re
import subprocess
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
# Git sets these for its hooks; with them git would look at the repository of the hook.
_GIT_HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
_FULL_COMMIT = re.compile("[0-9a-f]{40,64}")  # SHA-1 or SHA-256
_SHOWN_DIGITS = 12


def checked_out_commit(project: Path = _PROJECT) -> str | None:
    """Return the commit of a checkout; None if the folder is not a repository's top folder or git fails.

    The commit ends in ``-dirty`` if files other than results and documents differ from it.
    """
    if not (project / ".git").exists():  # an installation, perhaps in a folder of another repository
        return None
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--"]
    command += [".", ":!benchmarks/results", ":!docs"]
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_HOOK_VARIABLES}
    try:
        status = subprocess.run(command, cwd=project, env=environment, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None

    # Lines with # describe the branch; every other line is a file that differs.
    commit = ""
    is_dirty = False
    for line in status.stdout.decode(errors="replace").splitlines():
        if line.startswith("# branch.oid "):
            commit = line.split()[-1]
        elif not line.startswith("#"):
            is_dirty = True
    if not _FULL_COMMIT.fullmatch(commit):  # (initial): there is no commit yet
        return None
    short_commit = commit[:_SHOWN_DIGITS]
    return f"{short_commit}-dirty" if is_dirty else short_commit


def installed_commit(name: str = "fabric-train") -> str | None:
    """Return the commit that pip installed from a repository's address; None if it installed a folder or a wheel."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow

    try:
        origin = json.loads(distribution(name).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    return commit[:_SHOWN_DIGITS] if _FULL_COMMIT.fullmatch(commit) else None
