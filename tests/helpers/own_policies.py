"""The policies of ``examples/policies``, by the dotted paths under which a user serves them."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "policies"
OWN_POLICIES = {
    "knorm": "knorm:knorm",
    "keydiff": "keydiff:keydiff",
}
"""Paths by the policies' names; importable once this module is imported."""

if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
