"""What all serving benchmarks share: servers in turn, clients, rows of results, tables and plots."""
