"""The only package that imports sglang: registration, CPU platform, arena, tree, attention backend, refusals."""
