from __future__ import annotations

import sys
from pathlib import Path

# The benchmarks are scripts with a package beside them, not an installed package.
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / name) for name in ("serving", "gpu", "quality", "traces")]
