"""Environment of servers under test: strict leak checks, ``/health`` that answers at once, no Triton interpreter."""

from kvevict_tools.launcher import CPU_ENV, STRICT_CHECK_ENV

ENV = {
    **CPU_ENV,
    **STRICT_CHECK_ENV,
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "TRITON_INTERPRET": "0",
}
