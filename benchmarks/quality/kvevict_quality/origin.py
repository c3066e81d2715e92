"""Which code a row of results was measured with."""

from __future__ import annotations

import subprocess

from kvevict_quality.rows import ROOT


def commit() -> str:
    """Commit of this repository, short; ``+`` if files of the packages were changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "sgl_kvevict", "kernels")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
