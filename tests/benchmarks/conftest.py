from __future__ import annotations

import sys
from pathlib import Path

# The benchmarks are scripts with a package beside them, not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "serving"))
