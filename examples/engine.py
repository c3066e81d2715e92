"""Offline inference: `sgl.Engine` with the plugin, no server. A batch of prompts shares one compressed document.

`sgl.Engine` takes both backends as keywords; the plugin's configuration is in KVEVICT_CONFIG, as for a server. A prompt
without an answer (`max_new_tokens: 0`) has its prefix scored and compressed, then the batch reads the compressed copy.

    .venv/bin/python examples/engine.py [MODEL_FOLDER]
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from station import HANDBOOK, cache_line

from sgl_kvevict.launcher import CPU_ENV, has_fast_bfloat16
from sgl_kvevict.model import ensure_demo_model

DOCUMENT = HANDBOOK[HANDBOOK.index("\n5. ") : HANDBOOK.index("\n7. ")].strip()  # two chapters
LEADS = ("Drinking water comes from", "The supply boat is called the", "The captain of the boat is")


def device_settings() -> dict[str, Any]:
    """Keywords of `sgl.Engine` on this machine; none on a GPU. Without one it is our CPU platform."""
    if torch.cuda.is_available():
        return {}
    os.environ.update(CPU_ENV)  # before SGLang is imported
    return {"device": "cpu", "dtype": "auto" if has_fast_bfloat16() else "float32", "max_total_tokens": 6000}


def main(model: str | None = None) -> None:
    """Cache the document, wait until it is compressed, complete the sentences in one batch."""
    settings = device_settings()
    import sglang as sgl

    settings |= {"model_path": model or str(ensure_demo_model())}
    engine = sgl.Engine(radix_cache_backend="kvevict", attention_backend="kvevict", **settings)
    try:
        engine.generate(DOCUMENT, {"max_new_tokens": 0})
        while (cache := engine.get_server_info()["internal_states"][0]["kvevict"])["scoring_jobs"]:
            time.sleep(0.1)
        print(cache_line(cache))
        sampling = {"temperature": 0, "max_new_tokens": 12, "stop": ["\n", ". "]}
        replies = engine.generate([f"{DOCUMENT}\n\n{lead}" for lead in LEADS], sampling)
        for lead, reply in zip(LEADS, replies, strict=True):
            meta = reply["meta_info"]
            found = f"{meta['cached_tokens']:,} of {meta['prompt_tokens']:,} tokens from the cache"
            print(f"{lead} ... {reply['text'].strip()}  [{found}]")
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine starts processes that import this file again
    main(*sys.argv[1:])
