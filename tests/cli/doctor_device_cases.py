"""Cases of the rules on CANN, devices, imports and calls."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.doctor_findings import (
    ASCEND,
    CPU,
    CUDA,
    HEALTHY,
    INSTALLED_CANN,
    MINDSPORE,
    NO_MINDSPORE,
    NPU,
    SOURCED,
    TORCH,
    Case,
    checked,
    importing,
    job,
    on_machine,
    with_mindspore,
    with_npus,
    with_platforms,
)

NO_HCCL = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
NO_HAL = "ImportError: libascend_hal.so: cannot open shared object file: No such file or directory"
NO_SYMBOL = "ImportError: libtorch_npu.so: undefined symbol: MsprofSysCycleTime"
GPU = {"devices": replace(HEALTHY.machine.devices, cuda_files=("/dev/nvidia0",))}
NPU_MINDSPORE = with_mindspore(
    replace(MINDSPORE, devices=(*MINDSPORE.devices, NPU), cann_versions=("8.2", "8.5")),
    devices=ASCEND,
    cann=SOURCED,
)


CASES = {
    "cann_folder_missing": [
        Case(
            with_npus(cann=replace(SOURCED, missing=("ASCEND_OPP_PATH",))),
            ("ASCEND_OPP_PATH=/usr/local/Ascend/cann/opp", "source /usr/local/Ascend/cann/set_env.sh"),
            with_npus(),
        ),
    ],
    "cann_not_set": [
        Case(
            importing(f"{NO_HCCL}. Please run 'source set_env.sh'.", cann=INSTALLED_CANN),
            ("torch_npu needs CANN", "source /usr/local/Ascend/cann/set_env.sh"),
            with_npus(),
        ),
        Case(
            importing(NO_HAL, cann=replace(INSTALLED_CANN, scripts=())),
            (
                "Install CANN",
                "/usr/local/Ascend/cann/set_env.sh",
                "/usr/local/Ascend/ascend-toolkit/set_env.sh",
            ),
            on_machine(cann=INSTALLED_CANN),
        ),
        Case(
            with_mindspore(devices=ASCEND, cann=INSTALLED_CANN),
            ("mindspore needs CANN",),
            with_mindspore(cann=INSTALLED_CANN),
        ),
    ],
    "cann_partly_set": [
        Case(
            importing(NO_HCCL, cann=replace(SOURCED, library=None)),
            ("no folder of LD_LIBRARY_PATH holds libascendcl.so", "source /usr/local/Ascend/cann/set_env.sh"),
            with_npus(cann=replace(SOURCED, library=None)),
        ),
        Case(
            importing(
                "Exception: ASCEND_OPP_PATH environment variable is not set. run set_env.sh",
                cann=replace(SOURCED, variables={"ASCEND_HOME_PATH": "/a"}),
            ),
            ("ASCEND_OPP_PATH is not set",),
            NPU_MINDSPORE,
        ),
    ],
    "driver_library": [
        Case(
            importing(NO_HAL),
            ("torch_npu does not find libascend_hal.so", "/usr/local/Ascend/driver/lib64/driver"),
            importing(NO_HCCL),
        ),
    ],
    "cann_library": [
        Case(
            importing(NO_HCCL),
            ("libhccl.so", "source /usr/local/Ascend/cann/set_env.sh"),
            importing(NO_SYMBOL),
        ),
    ],
    "versions_mixed": [
        Case(
            importing(NO_SYMBOL), ("undefined symbol: MsprofSysCycleTime", "go together"), importing(NO_HCCL)
        ),
    ],
    "mindspore_cann": [
        Case(
            replace(
                NPU_MINDSPORE,
                machine=replace(NPU_MINDSPORE.machine, cann=replace(SOURCED, version="8.1.RC1")),
            ),
            ("CANN 8.1.RC1", "8.2, 8.5"),
            NPU_MINDSPORE,
        ),
        Case(
            replace(
                NPU_MINDSPORE, machine=replace(NPU_MINDSPORE.machine, cann=replace(SOURCED, version="8.50.0"))
            ),
            ("CANN 8.50.0",),
            replace(
                NPU_MINDSPORE, machine=replace(NPU_MINDSPORE.machine, cann=replace(SOURCED, version=None))
            ),
        ),
    ],
    "npu_without_package": [
        Case(on_machine(devices=ASCEND), ("2 NPU(s)", "hyper-parallel[torch-npu]"), HEALTHY),
        Case(on_machine(devices=ASCEND), (), NPU_MINDSPORE),
    ],
    "npu_no_access": [
        Case(
            with_npus(devices=replace(ASCEND, denied=("/dev/davinci1",))),
            ("may not open /dev/davinci1", "HwHiAiUser"),
            with_npus(),
        ),
    ],
    "npu_not_seen": [
        Case(
            with_npus(devices=HEALTHY.machine.devices),
            ("no /dev/davinci0", "--device /dev/davinci0"),
            HEALTHY,
        ),
    ],
    "devices_hidden": [
        Case(
            with_npus(variables={"ASCEND_RT_VISIBLE_DEVICES": ""}),
            ("ASCEND_RT_VISIBLE_DEVICES", "unset"),
            with_npus(variables={"ASCEND_RT_VISIBLE_DEVICES": "0"}),
        ),
        Case(
            on_machine(**GPU, variables={"CUDA_VISIBLE_DEVICES": "-1"}),
            ("CUDA_VISIBLE_DEVICES is set to '-1'",),
            job(CUDA_VISIBLE_DEVICES="-1"),
        ),
    ],
    "torch_npu_no_device": [
        Case(importing(None), ("2 NPU(s)", "npu-smi info"), with_npus()),
        Case(importing(None), (), importing(NO_SYMBOL)),
    ],
    "mindspore_no_device": [
        Case(
            with_mindspore(
                replace(MINDSPORE, no_npu="libge_runner.so: not found."), devices=ASCEND, cann=SOURCED
            ),
            (
                "libge_runner.so: not found.",
                "source /usr/local/Ascend/cann/set_env.sh",
                "set_device('Ascend')",
            ),
            NPU_MINDSPORE,
        ),
        Case(with_mindspore(devices=ASCEND, cann=SOURCED), ("it gives no reason",), with_mindspore()),
    ],
    "cuda_not_used": [
        Case(on_machine(**GPU), ("1 NVIDIA GPU(s), but torch 2.7.1+cpu finds none",), HEALTHY),
        Case(
            on_machine(**GPU),
            (),
            with_platforms(on_machine(**GPU), NO_MINDSPORE, replace(TORCH, devices=(CPU, CUDA))),
        ),
    ],
    "import_failed": [
        Case(
            importing("OSError: libmpi.so: cannot open shared object file", "torch"),
            (
                "torch is installed and cannot be imported: OSError: libmpi.so",
                "--force-reinstall torch==2.7.1+cpu",
            ),
            importing(NO_SYMBOL, "torch"),
        ),
        Case(
            importing("ImportError: half of it is gone."),
            ("half of it is gone.", "torch_npu==2.7.1.post2"),
            importing(NO_HCCL),
        ),
        Case(
            with_mindspore(
                replace(
                    MINDSPORE,
                    imports={"mindspore": "ImportError: libgomp.so: cannot open shared object file"},
                )
            ),
            ("--force-reinstall mindspore==2.10.0",),
            with_mindspore(),
        ),
    ],
    "framework_died": [
        Case(
            with_platforms(
                HEALTHY,
                NO_MINDSPORE,
                replace(TORCH, error="the process was ended by signal 11 (Segmentation fault)", devices=()),
            ),
            ("signal 11", "--timeout"),
            HEALTHY,
        ),
    ],
    "gloo_interface": [
        Case(
            checked("rank 0, 1: RuntimeError: ifa != nullptr. Unable to find address for: tun0"),
            ("tun0", "GLOO_SOCKET_IFNAME", "lo, eth0, enp1"),
            checked("rank 0: no answer"),
        ),
    ],
    "check_failed": [
        Case(
            checked("rank 1: no answer within 60 s"),
            (
                "all_reduce with gloo on 2 rank(s) of torch on cpu failed: rank 1: no answer within 60 s.",
                "GLOO_SOCKET_IFNAME=lo",
            ),
            checked(),
        ),
        Case(checked("rank 1: broken", backend="nccl"), ("NCCL_DEBUG=INFO",), checked(backend="nccl")),
        Case(checked("rank 1: broken", backend="hccl"), ("npu-smi info",), checked(backend="hccl")),
        Case(checked("rank 1: broken", backend="mccl"), ("GLOG_v=1",), checked(backend="mccl")),
    ],
    "check_wrong": [
        Case(checked(found=(3.0, 2.0)), ("gave 3, 2, not 3, 3", "Do not train"), checked()),
        Case(checked(found=(3.0,)), ("gave 3, not 3, 3",), checked(found=(3.00001, 3.0))),
        Case(checked(found=(float("nan"), 3.0)), ("gave nan, 3",), checked()),
    ],
}
