"""What is read of a machine, from folders that look like one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.cli.doctor.machine import Machine, read_machine
from tests.cli.doctor_sites import install


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def read(root: Path, **environ: str) -> Machine:
    return read_machine(environ, root)


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.python == sys.version_info[:3]
    assert machine.python_version == ".".join(map(str, sys.version_info[:3]))
    assert (machine.executable, machine.hyper_parallel) == (sys.executable, hyper_parallel.__version__)
    assert machine.cpu_cores == os.cpu_count()
    assert "lo" in machine.interfaces
    assert "Linux" in machine.system


def test_versions_are_those_of_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "raise RuntimeError('nobody should import this')"
    install(tmp_path, "torch_npu", "2.7.1.post2", source)
    install(tmp_path, "numpy", "2.4.1", source)
    monkeypatch.syspath_prepend(tmp_path)
    packages = read(tmp_path).packages
    assert (packages["torch_npu"], packages["numpy"]) == ("2.7.1.post2", "2.4.1")


def test_an_empty_machine(tmp_path: Path) -> None:
    machine = read(tmp_path)
    assert machine.devices.npu_files == machine.devices.cuda_files == machine.devices.denied == ()
    assert machine.devices.driver is machine.devices.npu_smi is None
    assert (machine.cann.variables, machine.cann.scripts, machine.cann.version) == ({}, (), None)
    assert (machine.variables, machine.missing_files) == ({}, ())
    assert "unknown distribution" in machine.system


@pytest.mark.parametrize(
    "variable", ["PATH", "HOME", "LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "RANK_TABLE_FILE"]
)
def test_paths_that_cannot_be_looked_at(variable: str, tmp_path: Path) -> None:
    """As of another user; a name that is too long is refused to root as well."""
    machine = read(tmp_path, **{variable: f"/bin:/{'a' * 5000}/bin"})
    empty = read(tmp_path)
    assert (machine.devices, machine.cann.scripts) == (empty.devices, ())
    assert machine.cann.missing == (variable,) * variable.startswith("ASCEND")
    assert machine.missing_files == (variable,) * (variable == "RANK_TABLE_FILE")


# ---- devices


def test_devices_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in (
        "davinci10",
        "davinci2",
        "davinci0",
        "davinci_manager",
        "nvidia0",
        "nvidiactl",
        "nvidia-uvm",
    ):
        write(tmp_path, f"dev/{name}")
    devices = read(tmp_path).devices
    assert devices.npu_files == tuple(f"{tmp_path}/dev/davinci{number}" for number in (0, 2, 10))
    assert devices.cuda_files == (f"{tmp_path}/dev/nvidia0",)
    assert devices.denied == ()


def test_devices_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        write(tmp_path, f"dev/{name}")
    forbidden = {f"{tmp_path}/dev/davinci1", f"{tmp_path}/dev/davinci_manager"}
    asked = []

    def access(path: Path, mode: int) -> bool:  # root may open any file
        asked.append(mode)
        return str(path) not in forbidden

    monkeypatch.setattr(os, "access", access)
    assert set(read(tmp_path).devices.denied) == forbidden
    assert set(asked) == {os.R_OK | os.W_OK}


def test_driver_and_tool(tmp_path: Path) -> None:
    write(tmp_path, "usr/local/Ascend/driver/version.info", "Version=25.0.rc1\nascendhal_version=7.35\n")
    write(tmp_path, "usr/local/sbin/npu-smi")
    devices = read(tmp_path).devices
    assert (devices.driver, devices.npu_smi) == ("25.0.rc1", f"{tmp_path}/usr/local/sbin/npu-smi")
    write(tmp_path, "opt/bin/npu-smi")
    assert read(tmp_path, PATH="/usr/bin:/opt/bin").devices.npu_smi == f"{tmp_path}/opt/bin/npu-smi"


# ---- CANN


def test_cann_that_is_installed_and_not_sourced(tmp_path: Path) -> None:
    write(tmp_path, "usr/local/Ascend/ascend-toolkit/set_env.sh")
    info = "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n"
    write(tmp_path, "usr/local/Ascend/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info", info)
    cann = read(tmp_path).cann
    assert cann.scripts == (f"{tmp_path}/usr/local/Ascend/ascend-toolkit/set_env.sh",)
    assert (cann.variables, cann.library, cann.version) == ({}, None, "8.3.RC1")


def test_newer_paths_and_the_administrators_come_first(tmp_path: Path) -> None:
    paths = [
        "usr/local/Ascend/cann/set_env.sh",
        "usr/local/Ascend/ascend-toolkit/set_env.sh",
        "usr/local/Ascend/cann-8.5.0/set_env.sh",
        "home/me/Ascend/cann/set_env.sh",
    ]
    for path in reversed(paths):
        write(tmp_path, path)
    assert read(tmp_path, HOME="/home/me").cann.scripts == tuple(f"{tmp_path}/{path}" for path in paths)
    assert len(read(tmp_path).cann.scripts) == 3


def test_cann_that_pip_has_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "site-packages/ascend/cann-9.0.0/set_env.sh")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert read(tmp_path).cann.scripts == (f"{tmp_path}/site-packages/ascend/cann-9.0.0/set_env.sh",)


def test_cann_that_is_sourced(tmp_path: Path) -> None:
    write(tmp_path, "opt/cann/set_env.sh")
    write(tmp_path, "opt/cann/compiler/version.info", "Version=8.5.0.1\n")
    write(tmp_path, "opt/cann/lib64/libascendcl.so")
    write(tmp_path, "usr/local/Ascend/cann/set_env.sh")
    (tmp_path / "opt/cann/opp").mkdir()
    cann = read(
        tmp_path,
        ASCEND_HOME_PATH="/opt/cann",
        ASCEND_OPP_PATH="/opt/cann/opp",
        LD_LIBRARY_PATH=":/usr/lib:/opt/cann/lib64",
    ).cann
    assert cann.variables == {"ASCEND_HOME_PATH": "/opt/cann", "ASCEND_OPP_PATH": "/opt/cann/opp"}
    assert (cann.library, cann.version, cann.missing) == ("/opt/cann/lib64", "8.5.0.1", ())
    assert cann.scripts[0] == f"{tmp_path}/opt/cann/set_env.sh"


def test_cann_variables_that_name_nothing(tmp_path: Path) -> None:
    cann = read(tmp_path, ASCEND_HOME_PATH="/opt/cann", ASCEND_OPP_PATH="", LD_LIBRARY_PATH="/opt/lib").cann
    assert (cann.variables, cann.missing) == ({"ASCEND_HOME_PATH": "/opt/cann"}, ("ASCEND_HOME_PATH",))
    assert cann.library is cann.version is None


# ---- variables


def test_only_variables_of_a_job_are_shown(tmp_path: Path) -> None:
    job = {"RANK": "0", "MS_ROLE": "MS_WORKER", "HCCL_IF_IP": "10.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    assert read(tmp_path, **job, SECRET_TOKEN="x", PATH="/bin", RANKING="1").variables == job


def test_a_rank_table_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, "a/table.json")
    assert read(tmp_path, RANK_TABLE_FILE="/a/table.json").missing_files == ()
    assert read(tmp_path, RANK_TABLE_FILE="/b/table.json").missing_files == ("RANK_TABLE_FILE",)
