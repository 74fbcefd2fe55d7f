"""What the library keeps between calls, kept per simulated rank: in a real job every rank is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import hyper_parallel.preparation
import hyper_parallel.sharing
from tests.contract.numpy_world import current_rank


class PerRank:
    """A dict of which each rank sees its own; a key that dies (a weak reference's callback) dies on all ranks."""

    def __init__(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {rank: {} for rank in range(64)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dicts[current_rank()], name)

    def __getitem__(self, key: Any) -> Any:
        return self._dicts[current_rank()][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._dicts[current_rank()][key] = value

    def __len__(self) -> int:
        return len(self._dicts[current_rank()])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dicts[current_rank()])

    def __contains__(self, key: Any) -> bool:
        return key in self._dicts[current_rank()]

    def pop(self, key: Any, *default: Any) -> Any:
        for kept in self._dicts.values():
            if kept is not self._dicts[current_rank()]:
                kept.pop(key, None)
        return self._dicts[current_rank()].pop(key, *default)


@contextmanager
def new_processes() -> Iterator[None]:
    """Ranks that remember nothing of earlier calls, and nothing of each other's."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (hyper_parallel.preparation, hyper_parallel.sharing):
            for name, kept in list(vars(module).items()):
                if isinstance(kept, dict | PerRank) and name.islower() and not name.startswith("__"):
                    patch.setattr(module, name, PerRank())
        yield
