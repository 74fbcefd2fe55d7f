"""The parity command with ranks that go wrong in some cases, for launchers to start.

The first argument says what goes wrong where, as in ``fsdp=wrong;tp+fsdp=die_on_one``; the rest are the command's.
With ``--device npu`` the NPU is a simulated one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hyper_parallel
from hyper_parallel.parity import worker
from hyper_parallel.parity.cases import Case
from hyper_parallel.parity.command import main


def rank() -> int:
    return hyper_parallel.get_platform().rank()


def wrong(case: Case, device_type: str) -> Any:
    """Another norm on rank 1."""
    right = hyper_parallel.clip_grad_norm_
    hyper_parallel.clip_grad_norm_ = lambda *args, **options: right(*args, **options) * (1 + 1e-3 * rank())
    try:
        return run_case(case, device_type)
    finally:
        hyper_parallel.clip_grad_norm_ = right


def raise_everywhere(case: Case, device_type: str) -> Any:
    raise ZeroDivisionError(f"no {case.parallelism} here \x1b[31m<&>")


def raise_on_one(case: Case, device_type: str) -> Any:
    if rank() == 1:
        raise ZeroDivisionError("the mistake of rank 1")
    return run_case(case, device_type)


def hang_on_one(case: Case, device_type: str) -> Any:
    Path(f"hanging{rank()}").touch()
    while rank() == 1:
        time.sleep(0.1)
    return run_case(case, device_type)


def die_on_one(case: Case, device_type: str) -> Any:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_case(case, device_type)


def die_as_rank_0(case: Case, device_type: str) -> Any:
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_case(case, device_type)


run_case = worker.run_case

if __name__ == "__main__":
    if "npu" in sys.argv:
        from tests.torch_backend import simulated_npu

        simulated_npu.set_up()
    mistakes = dict(each.split("=") for each in sys.argv[1].split(";"))
    worker.run_case = lambda case, device_type: globals()[mistakes.get(case.parallelism, "run_case")](
        case, device_type
    )
    status = main(sys.argv[2:])
    print(f"exit status {status}", flush=True)
    sys.exit(status)
