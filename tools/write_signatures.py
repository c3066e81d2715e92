"""Write the signatures of the installed SGLang's functions that we hook or override; it has to be a supported version.

Run: python tools/write_signatures.py
"""

from __future__ import annotations

import json
from importlib.metadata import version

from sgl_kvevict.machine import SUPPORTED_SGLANG
from sgl_kvevict.sglang_adapter import compat

if __name__ == "__main__":
    newest, installed, now = SUPPORTED_SGLANG[-1], version("sglang"), compat.signatures()
    written = json.loads(compat.SIGNATURES.read_text(encoding="utf-8"))
    known = {} if installed == newest else written[newest]
    changed = {name: now.get(name, compat.MISSING) for name in known | now if now.get(name) != known.get(name)}
    supported = {name: changed if name == installed else written[name] for name in SUPPORTED_SGLANG}
    compat.SIGNATURES.write_text(json.dumps(supported, indent=1, sort_keys=True) + "\n", encoding="utf-8")
