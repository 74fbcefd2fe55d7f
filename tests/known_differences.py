"""What one backend cannot express, and why. Tests that meet such a case look here for what to expect instead."""

from __future__ import annotations

KNOWN_DIFFERENCES: dict[tuple[str, str], str] = {
    ("mindspore", "foreach=True"): (
        "MindSpore exposes no foreach kernels in Python, so foreach=True raises RuntimeError on every rank; "
        "None and False do the same work."
    ),
    (
        "mindspore",
        "fully_shard",
    ): "MindSpore has no counterpart of torch's FSDP2 and parallelize_module models.",
    (
        "mindspore",
        "offload",
    ): "Only MindSpore on the CPU could be run, where no gradient lies on another device.",
    ("mindspore", "DTensor.shape"): (
        "A MindSpore DTensor is a Tensor, whose shape is that of its local part; global_shape is that of the whole."
    ),
}
