"""SGLang resolves its platform at import: choose ours before any test module imports it."""

import os

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
