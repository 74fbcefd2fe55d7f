"""Frameworks that fail in every way, each in real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel.cli.doctor import processes
from hyper_parallel.cli.doctor.child import error_line
from hyper_parallel.cli.doctor.examination import describe_platform, exercise
from hyper_parallel.cli.doctor.findings import Check, DeviceKind, PlatformFinding
from tests.cli.doctor_sites import install, install_platform

CPU = DeviceKind("cpu", "files", ("cpu",))
PATIENT, IMPATIENT = 60.0, 2.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 1.0)


def exercised(timeout: float = PATIENT, kind: DeviceKind = CPU, has_scheduler: bool = False) -> list[Check]:
    finding = PlatformFinding("fake", True, {"fake": None}, (kind,), has_scheduler=has_scheduler)
    return exercise(finding, kind, timeout)


# ---- describing


def test_what_a_framework_says_of_itself(site: Path) -> None:
    install_platform(site)
    assert describe_platform("fake", PATIENT) == PlatformFinding("fake", True, {"fake": None}, (CPU,))


def test_an_extension_is_imported_where_it_is_installed(site: Path) -> None:
    install_platform(site)
    install(site, "fake_extension", "1.0", "raise ImportError('libfake.so is missing')")
    finding = describe_platform("fake", PATIENT)
    assert finding.imports == {"fake": None, "fake_extension": "ImportError: libfake.so is missing"}
    assert finding.usable
    assert finding.devices == (CPU,)


def test_a_framework_that_is_not_installed_is_not_asked(site: Path) -> None:
    assert describe_platform("no_such_framework", PATIENT) == PlatformFinding("no_such_framework", False, {})


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('broken')", "ImportError: broken"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit", "SystemExit"),
        (
            "try:\n    raise ImportError('root')\nexcept ImportError:\n    raise SystemExit",
            "ImportError: root",
        ),
        (
            "try:\n    raise OSError('lib.so')\nexcept OSError as e:\n    raise RuntimeError('no backend') from e",
            "RuntimeError: no backend (after OSError: lib.so)",
        ),
    ],
)
def test_a_framework_that_cannot_be_imported(site: Path, source: str, error: str) -> None:
    install_platform(site, framework=source)
    finding = describe_platform("fake", PATIENT)
    assert (finding.imports, finding.error, finding.devices) == ({"fake": error}, None, ())
    assert not finding.usable


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import os; os.kill(os.getpid(), 11)", "the process was ended by signal 11 (Segmentation fault)"),
        (
            "import os; print('out of luck', flush=True); os._exit(3)",
            "the process ended with status 3 and no answer; its last words: out of luck",
        ),
        ("import time; time.sleep(100)", "no answer within 2 s"),
    ],
)
def test_a_framework_that_takes_the_process_along(site: Path, source: str, error: str) -> None:
    install_platform(site, framework=source)
    finding = describe_platform("fake", IMPATIENT if "sleep" in source else PATIENT)
    assert finding.error is not None
    assert finding.error.startswith(error)
    assert not finding.usable


def test_diagnostics_that_raise(site: Path) -> None:
    install_platform(site, "def describe(imported):\n    raise ValueError('no idea')")
    finding = describe_platform("fake", PATIENT)
    assert (finding.imports, finding.error) == ({"fake": None}, "ValueError: no idea")


# ---- exercising


def test_both_calls_on_two_ranks(site: Path) -> None:
    install_platform(site)
    reduced, clipped = exercised()
    assert (reduced.call, reduced.ranks, reduced.found, reduced.error) == ("all_reduce", 2, (3.0, 3.0), None)
    assert reduced.passed
    assert clipped.call == "clip_grad_norm_"
    assert clipped.error is not None  # there is no such platform
    assert "rank 0, 1: AttributeError" in clipped.error


def test_one_rank_for_each_device(site: Path) -> None:
    install_platform(site)
    reduced, _ = exercised(kind=DeviceKind("tpu", "files", ("a", "b", "c")))
    assert (reduced.ranks, reduced.expected, reduced.found) == (3, (6.0,) * 3, (6.0,) * 3)
    assert reduced.passed


def test_wrong_numbers_do_not_pass(site: Path) -> None:
    install_platform(site, "def all_reduce(device, number):\n    return number + 2 * (number < 2)")
    reduced, _ = exercised()
    assert (reduced.found, reduced.error, reduced.passed) == ((3.0, 2.0), None, False)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("raise RuntimeError('no link')", "rank 1: RuntimeError: no link"),
        ("os.kill(os.getpid(), 9)", "rank 1: the process was ended by signal 9 (Killed)"),
        ("raise SystemExit(0)", "rank 1: SystemExit: 0"),
        ("time.sleep(100)", "rank 0, 1: no answer within 2 s"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_wait(site: Path, act: str, error: str) -> None:
    works = "works = all_reduce\n"
    fails = f"def all_reduce(device, number):\n    if state['rank'] == 1:\n        {act}\n    return works(device, number)"
    install_platform(site, works + fails)
    start = time.monotonic()
    reduced, clipped = exercised(IMPATIENT if "sleep" in act else PATIENT)
    assert reduced.error == error
    assert (reduced.found, reduced.passed, clipped.passed) == ((), False, False)
    assert time.monotonic() - start < PATIENT / 2


def test_a_scheduler_runs_beside_the_ranks_and_is_not_waited_for(site: Path) -> None:
    meet = """
def join(device, rank, world_size, port, folder, timeout):
    state.update(rank=rank, world_size=world_size, folder=pathlib.Path(folder))
    if rank == -1:
        (state["folder"] / "met").write_text("")
        time.sleep(100)
    while not (state["folder"] / "met").exists():
        time.sleep(0.01)
"""
    install_platform(site, meet)
    reduced, _ = exercised(has_scheduler=True)
    assert reduced.passed


def test_ranks_do_not_see_the_job_of_the_user(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MS_ROLE", "RANK_TABLE_FILE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "kept")
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "other")
    seen = (
        "[k for k in ('RANK', 'WORLD_SIZE', 'MASTER_PORT', 'MS_ROLE', 'RANK_TABLE_FILE') if k in os.environ]"
    )
    kept = "[os.environ[k] for k in ('GLOO_SOCKET_IFNAME', 'HYPER_PARALLEL_PLATFORM')]"
    install_platform(site, f"def all_reduce(device, number):\n    raise ValueError(({seen}, {kept}))")
    reduced, _ = exercised()
    assert reduced.error == "rank 0, 1: ValueError: ([], ['kept', 'fake'])"


def test_no_process_stays_behind(site: Path, tmp_path: Path) -> None:
    """Neither of ranks that hang, nor of what they started."""
    act = (
        "def all_reduce(device, number):\n    import subprocess\n"
        "    other = subprocess.Popen(['sleep', '1000'])\n"
        f"    open(f'{tmp_path}/pids{{number}}', 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
        "    time.sleep(1000)\n"
    )
    install_platform(site, act)
    exercised(5.0)
    pids = [int(pid) for file in tmp_path.glob("pids*") for pid in file.read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_working_directory_is_not_searched(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_platform(site)
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in os.sys.path if entry])
    assert describe_platform("fake", PATIENT).usable


# ---- one line for an error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "ValueError: one"),
        ("", "ValueError"),
        ("first\nmiddle\nlast\n", "ValueError: first ... last"),
        ("told\nException raised from f at a.cpp:1\nframe #0: g", "ValueError: told"),
        ("told\n\n------\n- C++ Call Stack\n------\na.cc:1 f", "ValueError: told"),
        ("x" * 1000, "ValueError: " + "x" * 600),
    ],
)
def test_the_line_of_an_error(text: str, line: str) -> None:
    assert error_line(ValueError(text)) == line


def test_an_error_that_hides_its_context_is_the_root() -> None:
    def hide() -> None:
        try:
            raise OSError("hidden")
        except OSError:
            raise ValueError("shown") from None

    with pytest.raises(ValueError, match="shown") as raised:
        hide()
    assert error_line(raised.value) == "ValueError: shown"
