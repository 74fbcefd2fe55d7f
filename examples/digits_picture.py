"""The picture of the demo: loss, gradient norm and difference of every step, all runs over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from digits_run import Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Curves that agree hide one another: the first one is wide and pale, the next narrow, the last mere dots.
_STYLES: dict[str, dict[str, Any]] = {
    "torch": {"color": "#ee4c2c", "linewidth": 6, "alpha": 0.4, "solid_capstyle": "round"},
    "mindspore": {"color": "#1f4e9c", "linewidth": 1.6},
}
_REFERENCE: dict[str, Any] = {"color": "black", "linestyle": "none", "marker": "o", "markersize": 2.5}
_PAIR_COLORS = ("#7a3e9d", "#ee4c2c", "#1f4e9c")
_LABELS = {"torch": "PyTorch", "mindspore": "MindSpore"}


def draw(path: Path, runs: Sequence[Run], reference: Run, steps_per_epoch: int, tolerance: float) -> None:
    """Write the picture, in the format that the name ends with."""
    mpl.rcParams["font.size"] = 11
    figure = Figure(figsize=(10, 11), layout="constrained")
    loss, norm, difference = figure.subplots(3, 1, sharex=True, height_ratios=(3, 4, 3))
    names = " and ".join(_LABELS[run.name] for run in runs)
    figure.suptitle(f"Handwritten digits: {names}, from the same weights and batches", fontsize=14)
    _draw_curves(loss, [*runs, reference], "losses")
    loss.set(ylabel="loss")
    loss.legend(loc="upper right", frameon=False)
    loss.set_title("the curves lie over each other: wide, narrow, dots", loc="left", fontsize=11)
    _draw_curves(norm, [*runs, reference], "norms")
    _draw_threshold(norm, reference)
    norm.set(ylabel="gradient norm before clipping")
    _draw_differences(difference, runs, reference, tolerance)
    epochs = np.arange(0, len(reference.norms) + 1, steps_per_epoch)
    for axes in (loss, norm, difference):
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.vlines(epochs, 0, 1, color="0.93", linewidth=1, zorder=0, transform=axes.get_xaxis_transform())
    difference.set(xlabel=f"training step (vertical lines: epochs of {steps_per_epoch} steps)")
    difference.set_xlim(0, len(reference.norms) + 1)
    figure.savefig(path, dpi=130)


def _steps(run: Run) -> range:
    return range(1, len(run.norms) + 1)


def _draw_curves(axes: Axes, runs: Sequence[Run], what: str) -> None:
    for run in runs:
        style = _STYLES.get(run.name, _REFERENCE)
        label = _LABELS.get(run.name, f"{run.name}, one process")
        axes.plot(_steps(run), getattr(run, what), label=label, **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_threshold(axes: Axes, run: Run) -> None:
    share = f"{run.clipped():.0%} of the steps lie above max_norm = {run.max_norm:g} (dashed) and are clipped"
    axes.set_title(share if math.isfinite(run.max_norm) else "nothing is clipped", loc="left", fontsize=11)
    if 0 < run.max_norm < math.inf:
        top = 1.15 * max(max(run.norms), run.max_norm)
        axes.axhline(run.max_norm, color="black", linestyle="--", linewidth=1.2)
        axes.axhspan(run.max_norm, top, color="0.95", zorder=0)
        axes.set_ylim(top=top)


def _draw_differences(axes: Axes, runs: Sequence[Run], reference: Run, tolerance: float) -> None:
    pairs = [(run, reference) for run in runs]
    if len(runs) == 2:
        pairs.insert(0, (runs[0], runs[1]))
    for (one, other), color in zip(pairs, _PAIR_COLORS, strict=False):
        values = one.differences(other)
        values[values == 0] = np.nan  # has no place on a logarithmic axis
        label = f"{_LABELS[one.name]} and {_LABELS.get(other.name, other.name)}"
        axes.plot(_steps(one), values, ".", color=color, markersize=5, alpha=0.7, label=label)
    if tolerance > 0:
        axes.axhline(tolerance, color="black", linestyle="--", linewidth=1.2)
    axes.set_yscale("log")
    axes.set(ylabel="relative difference\nof the norms")
    axes.set_title(f"each dot is a step; tolerance {tolerance:g} (dashed)", loc="left", fontsize=11)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(pairs), frameon=False, markerscale=2
    )
