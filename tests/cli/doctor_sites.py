"""Site folders that hold what a test pretends to have installed."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, name: str, version: str, source: str = "", entry_points: str = "") -> None:
    """A distribution of one module."""
    (site / f"{name}.py").write_text(source)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def install_platform(site: Path, diagnostics: str = "", framework: str = "") -> None:
    """A platform ``fake`` with two CPU ranks; the sources of its framework and, on top, of its diagnostics."""
    install(site, "fake", "1.0", framework)
    install(
        site,
        "fake_adapter",
        "1.0",
        f"{_DIAGNOSTICS}\n{diagnostics}\n",
        "[hyper_parallel.platforms]\nfake = fake_adapter:Platform\n"
        "[hyper_parallel.diagnostics]\nfake = fake_adapter\n",
    )


_DIAGNOSTICS = """
import os, pathlib, signal, sys, time

packages = ("fake", "fake_extension")
has_scheduler = False
state = {}

def prepare():
    pass

def describe(imported):
    return {"devices": [{"type": "cpu", "backend": "files", "names": ["cpu"]}]}

def join(device, rank, world_size, port, folder, timeout):
    state.update(rank=rank, world_size=world_size, folder=pathlib.Path(folder))

def all_reduce(device, number):
    folder = state["folder"]
    folder.joinpath(f"rank{state['rank']}.partial").write_text(str(number))
    folder.joinpath(f"rank{state['rank']}.partial").rename(folder / f"rank{state['rank']}.txt")
    files = [folder / f"rank{rank}.txt" for rank in range(state["world_size"])]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    return sum(float(file.read_text()) for file in files)
"""
