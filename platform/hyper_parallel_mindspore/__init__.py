"""The MindSpore adapter: CPU with MCCL, Ascend with HCCL.

MindSpore is imported by the modules of this package, never here: ``local_ranks`` sets variables that MindSpore reads
while it is imported.
"""
