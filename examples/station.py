"""What the examples share: the document, a look at the cache, and settings for a machine without a GPU."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from sgl_kvevict.machine import has_fast_bfloat16

HANDBOOK = (Path(__file__).resolve().parent / "data" / "station_handbook.txt").read_text(encoding="utf-8").strip()
TASK = (
    "You are the guide of the Skerrin Point weather station. "
    "Answer questions about the handbook below in a few words.\n\n"
)
API_KEY = os.environ.get("SGL_KVEVICT_API_KEY") or "none"
"""Of a server with ``--api-key``; others take any."""
DEFAULT_URL = "http://127.0.0.1:30000"


def server_url() -> str:
    """The address on the command line, or ``DEFAULT_URL``; ends the program if no server answers there."""
    url = (sys.argv[1:] or [DEFAULT_URL])[0]
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
    except (OSError, ValueError) as error:  # nobody listens, or it is not an address
        raise SystemExit(
            f"{url}: no server answers ({error}); start one in another terminal: make serve, or give the URL of yours"
        ) from error
    return url


def cache_line(cache: dict[str, Any]) -> str:
    """One line on what the plugin holds, from its entry in ``GET /server_info``."""
    tokens, slots = cache["span_tokens"], cache["span_slots"]
    return f"compressed prefixes: {tokens:,} tokens in {slots:,} token slots"


def cache_of(url: str) -> dict[str, Any]:
    """What the plugin tells of its cache."""
    request = urllib.request.Request(f"{url}/server_info", headers={"Authorization": f"Bearer {API_KEY}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        cache: dict[str, Any] = json.load(reply)["internal_states"][0]["kvevict"]
    return cache


def engine_settings() -> dict[str, Any]:
    """Keywords of `sgl.Engine`: none on a GPU; without one our CPU platform, chosen before SGLang is imported."""
    import torch

    if torch.cuda.is_available():
        return {}
    os.environ.update(SGLANG_PLATFORM="kvevict_cpu", HF_HUB_OFFLINE="1", GOMP_SPINCOUNT="10000")
    dtypes = {} if has_fast_bfloat16() else {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
    return {"device": "cpu", "max_total_tokens": 6000, **dtypes}
