"""What one backend cannot express, and why. Tests that meet such a case look here for what to expect instead."""

from __future__ import annotations

KNOWN_DIFFERENCES: dict[tuple[str, str], str] = {
    ("mindspore", "foreach=True"): (
        "MindSpore exposes no foreach kernels in Python, so foreach=True raises RuntimeError on every rank; "
        "None and False do the same work."
    ),
    ("npu", "powers beyond float32"): (
        "An NPU has no float64, so squares are summed in float32: a norm above 1.8e19 is inf, one below 1e-19 loses its "
        "digits and then is 0, as in torch.nn.utils. To notice would take another pass or a wait for the device."
    ),
    (
        "npu",
        "counts beyond 2**24",
    ): "For the same reason a count of non-zeros (p = 0) above 2**24 is rounded.",
    (
        "mindspore",
        "fully_shard",
    ): "MindSpore has no counterpart of torch's FSDP2 and parallelize_module models.",
    (
        "mindspore",
        "offload",
    ): "Only MindSpore on the CPU could be run, where no gradient lies on another device.",
    ("mindspore", "graph Partial max"): (
        "A graph's all-reduce on the CPU only adds, so ClipGrads refuses Partial max and min."
    ),
    ("mindspore", "DTensor.shape"): (
        "A MindSpore DTensor is a Tensor, whose shape is that of its local part; global_shape is that of the whole."
    ),
}
