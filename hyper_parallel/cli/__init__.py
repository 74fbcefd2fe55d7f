"""The command line, ``hyper-parallel`` or ``python -m hyper_parallel.cli``; its packages come with the extra ``cli``."""
