"""What a checkout has and the wheel has not: servers and models for demo, tests and benchmarks, speculation on a CPU.

``make setup`` puts its folder on the path of ``.venv``.
"""
