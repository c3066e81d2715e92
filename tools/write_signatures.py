"""Write the signatures of SGLang's functions that we hook or override, with the supported version installed.

Run: python tools/write_signatures.py
"""

from __future__ import annotations

import json

from sgl_kvevict.sglang_adapter import compat

if __name__ == "__main__":
    compat.require_supported_sglang()
    compat.SIGNATURES.write_text(json.dumps(compat.signatures(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
