"""The same training in one process, in float64, written out in NumPy: what both backends should compute.

It shares no code with the library. Here the gradient lies in one piece, so its norm is simply its norm.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from digits_data import Images, Settings, initial_weights

Doubles: TypeAlias = npt.NDArray[np.float64]


class Trainer:
    """A multilayer perceptron with ReLU, softmax cross-entropy, and SGD with momentum."""

    rank = 0
    world_size = 1

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._params = [array.astype(np.float64) for layer in initial_weights(settings.seed) for array in layer]
        self._velocities = [np.zeros_like(param) for param in self._params]

    def step(self, batch: Images) -> tuple[float, float]:
        """Train on a batch; its mean loss, and the norm of its gradient before clipping."""
        loss, grads = self._loss_and_grads(batch)
        total_norm = float(np.sqrt(sum(np.sum(grad**2) for grad in grads)))
        coefficient = min(1.0, self._settings.max_norm / (total_norm + 1e-6))
        for param, velocity, grad in zip(self._params, self._velocities, grads, strict=True):
            velocity *= self._settings.momentum
            velocity += coefficient * grad
            param -= self._settings.learning_rate * velocity
        return loss, total_norm

    def count_correct(self, images: Images) -> int:
        return int(np.sum(self._activations(images)[-1].argmax(axis=1) == images.labels))

    def _activations(self, images: Images) -> list[Doubles]:
        """The input of each layer, and the logits."""
        values = [images.pixels.astype(np.float64)]
        for weight, bias in self._layers():
            hidden = values[-1] if len(values) == 1 else np.maximum(values[-1], 0)
            values[-1] = hidden
            values.append(hidden @ weight.T + bias)
        return values
