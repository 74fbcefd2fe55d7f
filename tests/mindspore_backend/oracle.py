"""What is right, in NumPy float64 on unsharded values, written without the library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spec:
    """One parameter: its global gradient, and where it lies.

    ``cuts`` says for each mesh dim which tensor dim it shards, or None for a copy; it is None for a plain tensor.
    ``mesh_dims`` are the names of the mesh dims that ``cuts`` is about, all of them by default.
    """

    values: np.ndarray
    cuts: tuple[int | None, ...] | None = None
    mesh_dims: tuple[str, ...] | None = None
    dtype: str = "float32"
    missing_on: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A model on the mesh ``sizes``, whose ranks are in row-major order."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    specs: tuple[Spec, ...] = field(repr=False)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def local(self, spec: Spec, rank: int) -> np.ndarray:
        """The part of ``rank``: chunks of ceil(size / n), from left to right."""
        if spec.cuts is None:
            return spec.values
        here = dict(zip(self.names, np.unravel_index(rank, self.sizes), strict=True))
        size_of = dict(zip(self.names, self.sizes, strict=True))
        part = spec.values
        for name, dim in zip(spec.mesh_dims or self.names, spec.cuts, strict=True):
            if dim is not None:
                chunk = -(-part.shape[dim] // size_of[name])
                part = np.moveaxis(
                    np.moveaxis(part, dim, 0)[here[name] * chunk : (here[name] + 1) * chunk], 0, dim
                )
        return part

    def counted(self) -> list[np.ndarray]:
        """Of each gradient the elements that some rank with a gradient holds."""
        found = []
        for spec in self.specs:
            numbered = Spec(np.arange(spec.values.size).reshape(spec.values.shape), spec.cuts, spec.mesh_dims)
            held = [
                self.local(numbered, r).reshape(-1)
                for r in range(self.world_size)
                if r not in spec.missing_on
            ]
            indices = np.unique(np.concatenate(held)) if held else []
            found.append(rounded(spec.values, spec.dtype).reshape(-1)[np.asarray(indices, int)])
        return found


def norm(values: Iterable[np.ndarray], p: float) -> float:
    """The p-norm of all values together."""
    flat = np.abs(np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in values] or [np.zeros(0)]))
    if math.isinf(p):
        return float(flat.max(initial=0.0) if p > 0 else flat.min(initial=math.inf))
    if p == 0:
        return float((flat != 0).sum())
    with np.errstate(all="ignore"):
        return float((flat**p).sum() ** (1 / p))


def rounded(values: Any, dtype: str) -> np.ndarray:
    """The nearest values of ``dtype``, to even, in float64."""
    single = np.asarray(values, np.float32)
    if dtype != "bfloat16":
        return np.asarray(values).astype(dtype).astype(np.float64)
    scale = np.exp2(np.floor(np.log2(np.abs(np.where(single == 0, 1, single)))) - 7)
    return np.where(np.isfinite(single), np.rint(single / scale) * scale, single).astype(np.float64)


def clipped(values: np.ndarray, dtype: str, total: float, max_norm: float) -> np.ndarray:
    """A gradient after clipping, rounded once; ``total`` is the norm."""
    coefficient = np.float32(min(1.0, max_norm / (total + 1e-6)))
    exact = rounded(values, dtype) * np.float64(coefficient)
    return rounded(exact.astype(np.float32) if dtype != "float64" else exact, dtype)


ULP = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 1e-6}


def assert_clipped(actual: Sequence[Any], case: Case, rank: int, total: float, max_norm: float) -> None:
    """The gradients that ``rank`` has after the call: within a unit in the last place of those of the oracle."""
    for spec, found in zip(case.specs, actual, strict=True):
        assert (found is None) == (rank in spec.missing_on)
        if found is not None:
            expected = clipped(case.local(spec, rank), spec.dtype, total, max_norm)
            assert found.shape == expected.shape
            np.testing.assert_allclose(
                found, expected, rtol=ULP[spec.dtype], atol=1e-45, err_msg=f"rank {rank}"
            )
