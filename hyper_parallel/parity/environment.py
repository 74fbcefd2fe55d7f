"""What a rank runs on: host, device, backend and versions, for the report.

Environment variables are not listed, as some are secret.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hyper_parallel.parity.local_ranks import find_local_ranks
from hyper_parallel.platforms import get_platform

_DISTRIBUTIONS = ("hyper-parallel", "numpy", "torch", "torch-npu", "mindspore")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Where one rank ran. ``versions`` are pairs of name and version, those of its own framework among them."""

    rank: int
    host: str
    device: str
    backend: str
    versions: tuple[tuple[str, str], ...]


def describe_rank(device_type: str) -> RankFacts:
    """Describe this process, which has joined its group."""
    selected = get_platform()
    told = _told(selected.name, device_type)
    device = told.pop("device", None) or (processor_name() if device_type == "cpu" else device_type)
    backend = told.pop("backend", "unknown")
    versions = {"Python": platform.python_version()} | installed_versions() | told
    if cann := cann_version(os.environ):
        versions["CANN"] = cann
    return RankFacts(selected.rank(), socket.gethostname(), device, backend, tuple(versions.items()))


def _told(platform_name: str, device_type: str) -> dict[str, str]:
    describe = getattr(find_local_ranks(platform_name), "describe", None)
    try:
        return dict(describe(device_type)) if describe else {}
    except Exception as error:  # noqa: BLE001  a device that cannot be named can still be tested
        return {"device": f"{device_type}, unknown: {error!r}"}


def installed_versions() -> dict[str, str]:
    """Of this library, NumPy and the frameworks, by their distributions' metadata: nothing is imported."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cann_version(environment: Mapping[str, str]) -> str | None:
    """Of the CANN whose environment is set, from ``compiler/version.info``, where MindSpore looks for it, too."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return None
    try:
        lines = (Path(home) / "compiler" / "version.info").read_text(errors="replace").splitlines()
    except OSError:
        return "unknown (no compiler/version.info)"
    values = [line.partition("=")[2].strip() for line in lines if line.startswith("Version=")]
    return values[0] if values else "unknown (no Version= in compiler/version.info)"


def processor_name() -> str:
    """The model name that Linux gives, else the machine's architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0]}" if names else f"CPU, {platform.machine()}"
