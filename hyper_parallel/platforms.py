"""Which adapter serves this process: the environment variable, else the framework that is already imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from hyper_parallel.interface import Platform

ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_PLATFORM"
GROUP = "hyper_parallel.platforms"

_INSTALL_HINTS = {
    "torch": "install it with: pip install 'hyper-parallel[torch]'",
    "torch_npu": "install it with: pip install 'hyper-parallel[torch-npu]', and source CANN's set_env.sh first",
    "mindspore": "install it with: pip install 'hyper-parallel[mindspore]'",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which platform a process gets, and why; ``name`` is None where none can be chosen, and ``reason`` says so.

    ``variable`` is the environment variable's value, ``choices`` the registered platforms, ``available`` those of
    them between which there is a choice without the variable.
    """

    name: str | None
    reason: str
    variable: str | None
    choices: tuple[str, ...]
    available: tuple[str, ...]


@lru_cache(maxsize=1)
def get_platform() -> Platform:
    """The adapter of this process, chosen once and cached.

    ``HYPER_PARALLEL_PLATFORM`` names an entry point of the group ``hyper_parallel.platforms``. Unset, it is the
    one adapter whose framework is imported already, else the only one that is installed.

    Raises:
        LookupError: none or several fit, or the variable names none of those that exist.
        ImportError: the named adapter or its framework cannot be imported; there is no falling through.
    """
    selection = select_platform()
    if selection.name is None:
        raise LookupError(selection.reason)
    return _load(_registered()[selection.name])


def select_platform() -> Selection:
    """What ``get_platform`` would choose now, without importing anything."""
    found = _registered()
    variable = os.environ.get(ENVIRONMENT_VARIABLE) or None
    imported = [name for name in found if name in sys.modules]
    available = tuple(imported or [name for name in found if importlib.util.find_spec(name) is not None])
    state = "imported" if imported else "installed"
    name = None
    if variable is not None:
        if variable in found:
            name, reason = variable, f"{ENVIRONMENT_VARIABLE}={variable}"
        else:
            reason = f"{ENVIRONMENT_VARIABLE}={variable} names no platform; choices: {_choices(found)}"
    elif len(available) == 1:
        (name,), reason = available, f"{available[0]} is the only supported framework that is {state}"
    else:
        several = f"several frameworks are {state} ({', '.join(available)})"
        fault = several if available else "no supported framework is installed"
        reason = f"{fault}: set {ENVIRONMENT_VARIABLE} to one of {_choices(found)}"
    return Selection(name, reason, variable, tuple(sorted(found)), available)


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _choices(found: dict[str, EntryPoint]) -> str:
    return ", ".join(sorted(found)) or f"none, as no package registers an entry point in the group {GROUP}"


def _load(entry: EntryPoint) -> Platform:
    try:
        adapter = entry.load()
    except ImportError as error:
        missing = (error.name or entry.name).partition(".")[0]
        hint = _INSTALL_HINTS.get(missing, f"install the package {missing}")
        raise ImportError(
            f"platform {entry.name!r} needs the package {missing}, which cannot be imported "
            f"({error}); {hint}",
            name=error.name,
        ) from error
    platform: Platform = adapter()
    return platform
