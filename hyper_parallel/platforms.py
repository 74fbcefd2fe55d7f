"""Which adapter serves this process: the environment variable, else the framework that is already imported."""

from __future__ import annotations

import importlib.util
import os
import sys
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


@lru_cache(maxsize=1)
def get_platform() -> Platform:
    """The adapter of this process, chosen once and cached.

    ``HYPER_PARALLEL_PLATFORM`` names an entry point of the group ``hyper_parallel.platforms``. Unset, it is the
    one adapter whose framework is imported already, else the only one that is installed.

    Raises:
        LookupError: none or several fit, or the variable names none of those that exist.
        ImportError: the named adapter or its framework cannot be imported; there is no falling through.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    return _load(found[_checked(name, found) if name else _detected(found)])


def _checked(name: str, found: dict[str, EntryPoint]) -> str:
    if name not in found:
        raise LookupError(f"{ENVIRONMENT_VARIABLE}={name} names no platform; choices: {_choices(found)}")
    return name


def _detected(found: dict[str, EntryPoint]) -> str:
    imported = [name for name in found if name in sys.modules]
    installed = imported or [name for name in found if importlib.util.find_spec(name) is not None]
    if len(installed) == 1:
        return installed[0]
    state = (
        f"several frameworks are {'imported' if imported else 'installed'} ({', '.join(installed)})"
        if installed
        else "no supported framework is installed"
    )
    raise LookupError(f"{state}: set {ENVIRONMENT_VARIABLE} to one of {_choices(found)}")


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
