"""What run_all.py measures, one module a section; needs torch and triton, nothing else."""
