"""What can be read of this machine without importing a framework: versions, device files, CANN, variables.

Everything comes from ``environ`` and from files under ``root``, so that a test can describe another machine.
Where CANN and the driver put what was not seen on a machine of ours: it is taken from their installation guides
(default paths, ``ascend_toolkit_install.info``), from the check that MindSpore 2.10 makes (``compiler/version.info``),
and from torch_npu's ``_cann_package_check`` (which variables have to be set).

Paths come from the user's variables and may lie where this user may not look, which ``Path.is_file`` and its kin raise
for in some versions of Python, and ``os.path`` and ``glob`` take for absent.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import hyper_parallel

PACKAGES = ("torch", "torch_npu", "mindspore", "numpy")
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
HIDING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
FILE_VARIABLES = ("RANK_TABLE_FILE",)

_SHOWN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "RANK_ID", "RANK_SIZE", "DEVICE_ID", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TP_SOCKET_IFNAME",
    *FILE_VARIABLES, *HIDING_VARIABLES,
)  # fmt: skip
_SHOWN_PREFIXES = ("MS_", "HCCL_", "NCCL_", "GLOO_", "HYPER_PARALLEL_")

# CANN 8.5 and later, then before; those of the administrator, of the user, and of pip in this environment.
_CANN_FOLDERS = ("Ascend/cann", "Ascend/ascend-toolkit", "Ascend/cann-*", "Ascend/nnae")


@dataclass(frozen=True, slots=True)
class Cann:
    """Ascend's toolkit: its variables, what is installed, and where libascendcl.so is found.

    ``scripts``: the ``set_env.sh`` files on this machine, the likeliest one first. ``library``: the folder of
    ``LD_LIBRARY_PATH`` that holds ``libascendcl.so``. ``missing``: variables that name a folder that is not there.
    """

    variables: Mapping[str, str]
    missing: tuple[str, ...] = ()
    library: str | None = None
    version: str | None = None
    scripts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Devices:
    """Accelerators as the driver shows them, whatever the frameworks make of them.

    ``denied``: files of NPUs that this user may not open. ``driver``: the version of Ascend's driver.
    """

    npu_files: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    driver: str | None = None
    npu_smi: str | None = None
    cuda_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """Python, system, versions, devices, CANN, and the variables of a distributed job.

    ``missing_files`` are variables that name a file that is not there, ``interfaces`` the network's.
    """

    python: tuple[int, int, int]
    executable: str
    system: str
    cpu_cores: int
    hyper_parallel: str
    packages: Mapping[str, str | None]
    devices: Devices
    cann: Cann
    variables: Mapping[str, str]
    missing_files: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()

    @property
    def python_version(self) -> str:
        return ".".join(map(str, self.python))


def read_machine(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Machine:
    """Look at this machine; takes milliseconds, imports no framework and opens no device."""
    return Machine(
        python=sys.version_info[:3],
        executable=sys.executable,
        system=f"{platform.platform()} ({_distribution(root)})",
        cpu_cores=os.cpu_count() or 1,
        hyper_parallel=hyper_parallel.__version__,
        packages={name: _version(name) for name in PACKAGES},
        devices=_read_devices(environ, root),
        cann=_read_cann(environ, root),
        variables={name: environ[name] for name in sorted(environ) if _is_shown(name)},
        missing_files=tuple(
            n for n in FILE_VARIABLES if n in environ and not os.path.isfile(_at(root, environ[n]))
        ),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_shown(name: str) -> bool:
    return name in _SHOWN_VARIABLES or name.startswith(_SHOWN_PREFIXES)


def _distribution(root: Path) -> str:
    return _field(root / "etc/os-release", "PRETTY_NAME") or "unknown distribution"


def _read_devices(environ: Mapping[str, str], root: Path) -> Devices:
    npu_files = _numbered(root / "dev", "davinci")
    control = [root / "dev" / name for name in ("davinci_manager", "devmm_svm", "hisi_hdc")]
    openable = [*npu_files, *filter(os.path.exists, control)]
    tools = [_at(root, folder) / "npu-smi" for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    return Devices(
        npu_files=tuple(map(str, npu_files)),
        denied=tuple(str(path) for path in openable if not os.access(path, os.R_OK | os.W_OK)),
        driver=_field(root / "usr/local/Ascend/driver/version.info", "Version"),
        npu_smi=_first([*tools, root / "usr/local/bin/npu-smi", root / "usr/local/sbin/npu-smi"]),
        cuda_files=tuple(map(str, _numbered(root / "dev", "nvidia"))),
    )


def _read_cann(environ: Mapping[str, str], root: Path) -> Cann:
    variables = {name: environ[name] for name in CANN_VARIABLES if environ.get(name)}
    homes = [_at(root, variables[name]) for name in CANN_VARIABLES[:2] if name in variables]
    beside = [folder / "set_env.sh" for home in homes for folder in (home, home.parent)]
    bases = [root / "usr/local", *([_at(root, environ["HOME"])] if environ.get("HOME") else [])]
    folders = [path for base in bases for name in _CANN_FOLDERS for path in _matches(base, name)]
    folders += [path for entry in sys.path for path in _matches(Path(entry), "ascend/cann*")]
    installed = [folder / "set_env.sh" for folder in folders]
    scripts = [path for path in dict.fromkeys([*beside, *installed]) if os.path.isfile(path)]
    found = homes or [folder for path in scripts for folder in (path.parent, path.parent / "latest")]
    libraries = [entry for entry in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]
    return Cann(
        variables=variables,
        missing=tuple(name for name, path in variables.items() if not os.path.isdir(_at(root, path))),
        library=next(
            (entry for entry in libraries if os.path.exists(_at(root, entry) / "libascendcl.so")), None
        ),
        version=next(filter(None, map(_cann_version, found)), None),
        scripts=tuple(map(str, scripts)),
    )


def _cann_version(home: Path) -> str | None:
    installed = _matches(home, "*-linux/ascend_*_install.info")
    fields = [(home / "compiler/version.info", "Version"), *((path, "version") for path in installed)]
    return next(filter(None, (_field(path, name) for path, name in fields)), None)


def _at(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _numbered(folder: Path, name: str) -> list[Path]:
    found = ((re.fullmatch(rf"{name}(\d+)", path.name), path) for path in _matches(folder, f"{name}*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def _first(paths: Iterable[Path]) -> str | None:
    return next((str(path) for path in paths if os.path.isfile(path)), None)


def _matches(folder: Path, pattern: str) -> list[Path]:
    return [folder / name for name in sorted(glob.glob(pattern, root_dir=folder))]


def _field(path: Path, name: str) -> str | None:
    """The value of ``name=value`` in a file, None if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition("=") for line in lines)
    return next((value.strip().strip('"') for key, _, value in pairs if key.strip() == name), None) or None
