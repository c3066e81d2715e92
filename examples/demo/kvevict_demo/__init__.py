"""The demo in parts: programs, rounds in turn, a working set too large for the pool, tables, picture."""

import os

# Libraries that this process loads draw progress bars of their own between the demo's lines.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
