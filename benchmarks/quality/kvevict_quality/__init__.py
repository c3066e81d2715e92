"""Quality of compressed prefixes: generated tasks, fidelity on real text, peers; see docs/quality.md."""
