"""SGLang 0.5.23 for a machine with torch 2.11 (CUDA 13) and no network: ``docs/gpu.md`` says how to use it."""
