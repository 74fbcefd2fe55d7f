"""What reached the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: its name, the dtype of its tensors, the reduce op (empty for none) and the ranks."""

    name: str
    dtype: str
    reduce_op: str
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Calls:
    """``operators`` by name, collectives, and the operators for which the host waits for the device."""

    operators: list[str] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


_listeners: list[Calls] = []


@contextmanager
def recorded() -> Iterator[Calls]:
    """All calls while the context lasts."""
    calls = Calls()
    _listeners.append(calls)
    try:
        yield calls
    finally:
        _listeners.remove(calls)


def operator(name: str) -> None:
    for calls in _listeners:
        calls.operators.append(name)


def collective(call: Collective) -> None:
    for calls in _listeners:
        calls.collectives.append(call)


def wait(name: str) -> None:
    for calls in _listeners:
        calls.waits.append(name)
