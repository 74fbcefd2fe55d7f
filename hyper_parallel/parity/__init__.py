"""The parity suite: the same cases on every backend, against a float64 oracle and against each other.

``python -m hyper_parallel.parity --platforms torch mindspore`` runs it on ranks of its own, and the same command under
torchrun or msrun on theirs; the extra ``parity`` installs what it needs.
"""
