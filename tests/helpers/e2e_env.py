"""Environment of the servers under test: strict leak checks, and no Triton interpreter."""

from sgl_kvevict.launcher import CPU_ENV, STRICT_CHECK_ENV

ENV = {**CPU_ENV, **STRICT_CHECK_ENV, "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1", "TRITON_INTERPRET": "0"}
