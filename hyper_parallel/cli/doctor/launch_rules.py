"""Rules on the variables that place a process in a job.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the LOCAL_ ones, msrun sets the MS_ ones, RANK_ID and
RANK_SIZE.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from hyper_parallel.cli.doctor.findings import Findings
from hyper_parallel.cli.doctor.machine import INTERFACE_VARIABLES
from hyper_parallel.cli.doctor.rule import ERROR, WARNING, Fields, Rule

_TORCH_JOB = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
_MINDSPORE_JOB = {
    "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118",
}  # fmt: skip
_RANKS = {
    "RANK": ("WORLD_SIZE",),
    "LOCAL_RANK": ("LOCAL_WORLD_SIZE",),
    "RANK_ID": ("RANK_SIZE", "MS_WORKER_NUM"),
}
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK_SIZE", "MS_WORKER_NUM")
_PORTS = ("MASTER_PORT", "MS_SCHED_PORT")
_SAME = (
    (("RANK",), ("RANK_ID",)),
    (("WORLD_SIZE",), ("RANK_SIZE", "MS_WORKER_NUM")),
    (("RANK_SIZE",), ("MS_WORKER_NUM",)),
)


def _not_a_number(findings: Findings) -> Fields:
    variables = findings.machine.variables
    accepted = {
        **dict.fromkeys(_RANKS, (0, None, "a rank, which is a number from 0")),
        **dict.fromkeys(_SIZES, (1, None, "a number of ranks, which is at least 1")),
        **dict.fromkeys(_PORTS, (1, 65535, "a port, which is a number from 1 to 65535")),
    }
    for variable, (lowest, highest, words) in accepted.items():
        number = _number(variables, variable)
        if variable in variables and (number is None or number < lowest or (highest and number > highest)):
            yield {"variable": variable, "value": variables[variable], "accepted": words}


def _rank_out_of_range(findings: Findings) -> Fields:
    variables = findings.machine.variables
    for rank, sizes in _RANKS.items():
        size = next((name for name in sizes if _number(variables, name) is not None), None)
        value, limit = _number(variables, rank), _number(variables, size)
        if value is not None and limit is not None and value >= limit >= 1:
            yield {"rank": rank, "value": value, "size": size, "limit": limit, "last": limit - 1}


def _torch_job_incomplete(findings: Findings) -> Fields:
    yield from _incomplete(findings.machine.variables, _TORCH_JOB)


def _mindspore_job_incomplete(findings: Findings) -> Fields:
    yield from _incomplete(findings.machine.variables, _MINDSPORE_JOB)


def _incomplete(variables: Mapping[str, str], job: Mapping[str, str]) -> Fields:
    present = [name for name in job if name in variables]
    absent = [name for name in job if name not in variables]
    if present and absent:
        example = " ".join(f"{name}={job[name]}" for name in absent)
        yield {"present": ", ".join(present), "absent": ", ".join(absent), "example": example}


def _ranks_disagree(findings: Findings) -> Fields:
    variables = findings.machine.variables
    for ones, others in _SAME:
        for one, other in product(ones, others):
            first, second = _number(variables, one), _number(variables, other)
            if first is not None and second is not None and first != second:
                yield {"one": one, "first": first, "other": other, "second": second}


def _master_is_this_machine(findings: Findings) -> Fields:
    variables = findings.machine.variables
    address = variables.get("MASTER_ADDR", "")
    size, here = _number(variables, "WORLD_SIZE"), _number(variables, "LOCAL_WORLD_SIZE")
    loopback = address.startswith("127.") or address in ("localhost", "::1")
    if loopback and size is not None and here is not None and size > here:
        yield {"variable": "MASTER_ADDR", "address": address, "size": size, "here": here}


def _file_missing(findings: Findings) -> Fields:
    machine = findings.machine
    for variable in machine.missing_files:
        yield {"variable": variable, "path": machine.variables[variable]}


def _interface_missing(findings: Findings) -> Fields:
    machine = findings.machine
    for variable in INTERFACE_VARIABLES:
        value = machine.variables.get(variable)
        if value and not _names_an_interface(variable, value, machine.interfaces):
            yield {"variable": variable, "value": value, "interfaces": ", ".join(machine.interfaces)}


def _names_an_interface(variable: str, value: str, interfaces: tuple[str, ...]) -> bool:
    names = value.lstrip("^=").split(",")
    if variable == "GLOO_SOCKET_IFNAME":  # whole names, and it opens every one; a blank is part of a name
        return set(value.split(",")) <= set(interfaces)
    if variable == "TP_SOCKET_IFNAME":
        return value in interfaces
    # NCCL and HCCL: the beginnings of names, whole ones after "=", and all others after "^"
    if value.startswith("^"):
        return True
    matches = str.__eq__ if value.startswith("=") else str.startswith
    return any(matches(each, name) for each in interfaces for name in names)


def _number(variables: Mapping[str, str], name: str | None) -> int | None:
    try:
        return int(variables.get(name or "", ""))
    except ValueError:
        return None


RULES = (
    Rule(
        "not_a_number", ERROR, _not_a_number,
        "{variable}={value!r} is not {accepted}.",
        "Set it by the launcher (torchrun or msrun), or unset it.",
    ),
    Rule(
        "rank_out_of_range", ERROR, _rank_out_of_range,
        "{rank}={value} is not less than {size}={limit}: ranks count from 0.",
        "Set {rank} to 0 to {last}, or {size} to the number of processes of the job.",
    ),
    Rule(
        "torch_job_incomplete", ERROR, _torch_job_incomplete,
        "torch.distributed needs four variables to find the other ranks. Set: {present}; not set: {absent}.",
        "Start with torchrun, which sets all, or export {example}; for a single process unset those that are set.",
    ),
    Rule(
        "mindspore_job_incomplete", ERROR, _mindspore_job_incomplete,
        "MindSpore needs four variables to find its scheduler. Set: {present}; not set: {absent}.",
        "Start with msrun, which sets all, or export {example}; for a single process unset those that are set.",
    ),
    Rule(
        "ranks_disagree", WARNING, _ranks_disagree,
        "{one}={first} and {other}={second} name the same thing differently.",
        "Unset those of the framework that does not run, or start with one launcher: torchrun or msrun.",
    ),
    Rule(
        "master_is_this_machine", ERROR, _master_is_this_machine,
        "{variable}={address} means each machine itself, but the job spans several "
        "({here} of {size} ranks are on this one).",
        "Set {variable} to the address of the machine of rank 0, the same on all machines.",
    ),
    Rule(
        "file_missing", ERROR, _file_missing,
        "{variable}={path} names a file that is not there.",
        "Write the rank table to that path on this machine, or unset {variable} and start with msrun or torchrun.",
    ),
    Rule(
        "interface_missing", ERROR, _interface_missing,
        "{variable}={value} names no network interface of this machine.",
        "export {variable}=<interface>, one of: {interfaces}; or unset it.",
    ),
)  # fmt: skip
