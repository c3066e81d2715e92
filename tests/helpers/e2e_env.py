"""Environment of servers under test: strict leak checks, ``/health`` that answers at once, no Triton interpreter.

All have one cache folder, which lasts: the scores of a tiny model, which is the same each time, are learned once.
"""

from kvevict_tools.launcher import CPU_ENV, STRICT_CHECK_ENV
from sgl_kvevict.cli.model_names import models_dir

ENV = {
    "XDG_CACHE_HOME": str(models_dir().with_name("tests")),
    **CPU_ENV,
    **STRICT_CHECK_ENV,
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "TRITON_INTERPRET": "0",
}
