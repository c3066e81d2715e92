"""A forward of recurrent layers for a CPU, which SGLang has not: slow, and only for tests.

A server takes it when ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names this package. Everything around it is SGLang's own: the
model, the pools of states, and which state a request begins with. An answer is right only if that state is.
"""
