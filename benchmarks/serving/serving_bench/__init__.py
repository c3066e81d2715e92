"""What all serving benchmarks share: servers in turn, clients, rows of results, tables and plots."""

from __future__ import annotations

import sys
from pathlib import Path

# The benchmarks of answers are scripts with a package beside them, whose texts serve here too.
sys.path.append(str(Path(__file__).resolve().parents[2] / "quality"))
