"""The same training in one process and in float64, written out in NumPy: what both backends should arrive at.

It shares no code with the library. Here the gradient lies in one piece, and its norm is simply its norm.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from digits_data import Digits, Images, Settings, initial_weights

Doubles: TypeAlias = npt.NDArray[np.float64]


def train(settings: Settings, digits: Digits) -> tuple[list[float], list[float], float]:
    """The loss of every step, the norm of every step before clipping, and the share of digits recognised."""
    trainer = ReferenceTrainer(settings)
    steps = range(settings.epochs * digits.steps_per_epoch(settings))
    records = [trainer.step(digits.batch(settings, step)) for step in steps]
    losses, norms = ([record[column] for record in records] for column in (0, 1))
    return losses, norms, trainer.count_correct(digits.test) / len(digits.test)


class ReferenceTrainer:
    """Linear layers with tanh between them, softmax cross-entropy, SGD with momentum."""

    rank = 0

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._params = [array.astype(np.float64) for pair in initial_weights(settings.seed) for array in pair]
        self._velocities = [np.zeros_like(param) for param in self._params]

    def step(self, batch: Images) -> tuple[float, float]:
        loss, grads = self._loss_and_grads(batch)
        total_norm = float(np.sqrt(sum(np.sum(grad**2) for grad in grads)))
        coefficient = min(1.0, self._settings.max_norm / (total_norm + 1e-6))
        for param, velocity, grad in zip(self._params, self._velocities, grads, strict=True):
            velocity *= self._settings.momentum
            velocity += coefficient * grad
            param -= self._settings.learning_rate * velocity
        return loss, total_norm

    def count_correct(self, images: Images) -> int:
        _, logits = self._forward(images)
        return int(np.sum(logits.argmax(axis=1) == images.labels))

    def _forward(self, images: Images) -> tuple[list[Doubles], Doubles]:
        """The input of each layer, and the logits."""
        inputs = [images.pixels.astype(np.float64)]
        for weight, bias in zip(self._params[::2], self._params[1::2], strict=True):
            logits = inputs[-1] @ weight.T + bias
            inputs.append(np.tanh(logits))
        return inputs[:-1], logits

    def _loss_and_grads(self, batch: Images) -> tuple[float, list[Doubles]]:
        inputs, logits = self._forward(batch)
        rows = np.arange(len(batch))
        logits = logits - logits.max(axis=1, keepdims=True)
        log_probabilities = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
        upstream = np.exp(log_probabilities)
        upstream[rows, batch.labels] -= 1
        upstream /= len(batch)
        grads: list[Doubles] = []
        for layer in reversed(range(len(inputs))):
            grads = [upstream.T @ inputs[layer], upstream.sum(axis=0), *grads]
            # Of what goes on to the pixels nobody makes use.
            upstream = upstream @ self._params[2 * layer] * (1 - inputs[layer] ** 2)
        return float(-np.mean(log_probabilities[rows, batch.labels])), grads
