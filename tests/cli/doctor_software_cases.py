"""Cases of the rules on a job's variables, on Python, the frameworks and which of them is chosen."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.cli.doctor.findings import Findings
from tests.cli.doctor_findings import (
    HEALTHY,
    NO_MINDSPORE,
    SELECTED,
    Case,
    job,
    on_machine,
    with_mindspore,
    with_npus,
    with_platforms,
)

TORCH_JOB = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MINDSPORE_JOB = {
    "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "8118",
    "RANK_ID": "1", "RANK_SIZE": "8",
}  # fmt: skip
SEVERAL = replace(
    SELECTED,
    name=None,
    reason="several frameworks are installed (mindspore, torch): set it",
    available=("mindspore", "torch"),
)
NOTHING = replace(SELECTED, name=None, reason="no supported framework is installed", available=())


def on_python(*version: int, **changes: object) -> Findings:
    return replace(on_machine(python=version), **changes)


def chosen(variable: str) -> Findings:
    known = variable in SELECTED.choices
    reason = f"HYPER_PARALLEL_PLATFORM={variable}" + (
        "" if known else " names no platform; choices: mindspore, torch"
    )
    return replace(
        HEALTHY,
        selection=replace(SELECTED, name=variable if known else None, reason=reason, variable=variable),
    )


CASES = {
    "not_a_number": [
        Case(
            job(**TORCH_JOB | {"RANK": "first"}), ("RANK='first' is not a rank", "torchrun"), job(**TORCH_JOB)
        ),
        Case(job(**TORCH_JOB | {"RANK": "-1"}), ("RANK='-1'",), job(**TORCH_JOB | {"RANK": "0"})),
        Case(job(**TORCH_JOB | {"WORLD_SIZE": "0"}), ("WORLD_SIZE='0'", "at least 1"), job(**TORCH_JOB)),
        Case(
            job(**TORCH_JOB | {"MASTER_PORT": "65536"}),
            ("1 to 65535",),
            job(**TORCH_JOB | {"MASTER_PORT": "65535"}),
        ),
        Case(job(**MINDSPORE_JOB | {"MS_SCHED_PORT": ""}), ("MS_SCHED_PORT=''",), job(**MINDSPORE_JOB)),
    ],
    "rank_out_of_range": [
        Case(
            job(**TORCH_JOB | {"RANK": "8"}),
            ("RANK=8 is not less than WORLD_SIZE=8", "0 to 7"),
            job(**TORCH_JOB | {"RANK": "7"}),
        ),
        Case(
            job(LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"),
            ("LOCAL_RANK=2",),
            job(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
        ),
        Case(job(RANK_ID="9", RANK_SIZE="8"), ("RANK_ID=9", "RANK_SIZE=8"), job(RANK_ID="7", RANK_SIZE="8")),
    ],
    "torch_job_incomplete": [
        Case(
            job(RANK="0", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1"),
            ("Set: RANK, WORLD_SIZE, MASTER_ADDR; not set: MASTER_PORT.", "export MASTER_PORT=29500"),
            job(**TORCH_JOB),
        ),
        Case(job(MASTER_PORT="1"), ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1",), job(LOCAL_RANK="0")),
    ],
    "mindspore_job_incomplete": [
        Case(
            job(MS_ROLE="MS_WORKER", MS_WORKER_NUM="2"),
            ("not set: MS_SCHED_HOST, MS_SCHED_PORT.", "msrun"),
            job(**MINDSPORE_JOB),
        ),
    ],
    "ranks_disagree": [
        Case(job(**TORCH_JOB, RANK_ID="2"), ("RANK=1 and RANK_ID=2",), job(**TORCH_JOB, RANK_ID="1")),
        Case(
            job(**MINDSPORE_JOB | {"RANK_SIZE": "4"}),
            ("RANK_SIZE=4 and MS_WORKER_NUM=8",),
            job(**MINDSPORE_JOB),
        ),
    ],
    "master_is_this_machine": [
        Case(
            job(**TORCH_JOB | {"MASTER_ADDR": "localhost"}, LOCAL_WORLD_SIZE="4"),
            ("MASTER_ADDR=localhost", "4 of 8 ranks"),
            job(**TORCH_JOB | {"MASTER_ADDR": "localhost"}, LOCAL_WORLD_SIZE="8"),
        ),
        Case(
            job(**TORCH_JOB | {"MASTER_ADDR": "127.0.0.1"}, LOCAL_WORLD_SIZE="4"),
            ("MASTER_ADDR=127.0.0.1",),
            job(**TORCH_JOB, LOCAL_WORLD_SIZE="4"),
        ),
    ],
    "file_missing": [
        Case(
            on_machine(variables={"RANK_TABLE_FILE": "/no/table.json"}, missing_files=("RANK_TABLE_FILE",)),
            ("RANK_TABLE_FILE=/no/table.json",),
            on_machine(variables={"RANK_TABLE_FILE": "/a/table.json"}),
        ),
    ],
    "interface_missing": [
        Case(
            job(GLOO_SOCKET_IFNAME="eth1"),
            ("GLOO_SOCKET_IFNAME=eth1", "one of: lo, eth0, enp1"),
            job(GLOO_SOCKET_IFNAME="lo,eth0"),
        ),
        Case(job(GLOO_SOCKET_IFNAME="lo,eth1"), ("GLOO_SOCKET_IFNAME",), job(GLOO_SOCKET_IFNAME="")),
        Case(job(GLOO_SOCKET_IFNAME="eth"), ("GLOO_SOCKET_IFNAME",), job(NCCL_SOCKET_IFNAME="eth")),
        Case(job(GLOO_SOCKET_IFNAME="lo, eth0"), ("GLOO_SOCKET_IFNAME",), job(TP_SOCKET_IFNAME="eth0")),
        Case(job(TP_SOCKET_IFNAME="eth"), ("TP_SOCKET_IFNAME=eth",), job(HCCL_SOCKET_IFNAME="ib,enp")),
        Case(
            job(HCCL_SOCKET_IFNAME="=eth"), ("HCCL_SOCKET_IFNAME==eth",), job(HCCL_SOCKET_IFNAME="=ib0,eth0")
        ),
        Case(job(NCCL_SOCKET_IFNAME="ib"), ("NCCL_SOCKET_IFNAME=ib",), job(NCCL_SOCKET_IFNAME="^ib")),
    ],
    "mindspore_python": [
        Case(
            on_python(3, 13, 1, wanted=("mindspore",)),
            ("no package for Python 3.13.1", "3.10 to 3.12"),
            on_python(3, 12, 9, wanted=("torch",)),
        ),
        Case(
            on_python(3, 9, 1, selection=chosen("mindspore").selection),
            ("Python 3.9.1",),
            on_python(3, 13, 1),
        ),
        Case(
            on_python(3, 14, 0, wanted=("mindspore",)),
            ("Python 3.14.0",),
            replace(with_mindspore(python=(3, 14, 0)), wanted=("mindspore",)),
        ),
    ],
    "platform_not_installed": [
        Case(
            replace(HEALTHY, wanted=("mindspore",)),
            ("--platform asks for mindspore", "hyper-parallel[mindspore]"),
            replace(HEALTHY, wanted=("torch",)),
        ),
        Case(chosen("mindspore"), ("HYPER_PARALLEL_PLATFORM asks for mindspore",), chosen("torch")),
    ],
    "platform_unknown": [
        Case(chosen("jax"), ("=jax names no platform", "choices: mindspore, torch"), chosen("torch"))
    ],
    "no_platform": [
        Case(
            with_platforms(
                replace(HEALTHY, selection=NOTHING), NO_MINDSPORE, replace(NO_MINDSPORE, name="torch")
            ),
            ("pip install 'hyper-parallel[torch]'",),
            HEALTHY,
        ),
    ],
    "several_platforms": [
        Case(
            replace(HEALTHY, selection=SEVERAL),
            ("mindspore, torch", "export HYPER_PARALLEL_PLATFORM=torch (or mindspore)"),
            HEALTHY,
        ),
        Case(
            replace(HEALTHY, selection=SEVERAL),
            (),
            replace(HEALTHY, selection=replace(SEVERAL, name="torch", variable="torch")),
        ),
    ],
    "mindspore_numpy": [
        Case(
            with_mindspore(packages={"numpy": "2.4.1"}),
            ("MindSpore 2.10.0", "NumPy 2.4.1", "pip install 'numpy>=1.26,<2'"),
            with_mindspore(),
        ),
        Case(with_mindspore(packages={"numpy": "2.0.0rc1"}), (), on_machine(packages={"numpy": "2.4.1"})),
    ],
    "torch_npu_version": [
        Case(
            with_npus(packages={"torch_npu": "2.8.0.post2"}),
            ("torch_npu 2.8.0.post2 belongs to torch 2.8.0, but torch is 2.7.1+cpu", "'torch==2.8.0'"),
            with_npus(),
        ),
        Case(
            with_npus(packages={"torch_npu": "2.7.1", "torch": "2.7.0"}),
            ("'torch==2.7.1'",),
            with_npus(packages={"torch_npu": "2.7.1rc1"}),
        ),
        Case(
            with_platforms(
                with_npus(packages={"torch_npu": "2.7.1", "torch": None}),
                NO_MINDSPORE,
                replace(NO_MINDSPORE, name="torch"),
            ),
            ("torch is not installed",),
            with_npus(packages={"torch_npu": "2.7.1.dev20250724"}),
        ),
    ],
}
