"""SGLang resolves its platform at import, Triton whether to interpret: chosen before any test module imports them."""

import os

os.environ.setdefault("SGLANG_PLATFORM", "kvevict_cpu")
os.environ["TRITON_INTERPRET"] = "1"  # servers get an environment of their own
