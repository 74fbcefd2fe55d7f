"""What every process of the demo agrees on: the settings, the data, the first weights and the order of batches.

All of it is NumPy and follows from one seed, so that each backend starts from the same numbers and sees the
same images in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]

LAYER_SIZES = (64, 128, 64, 10)
MESH_DIM_NAMES = ("replicate", "shard")
TEST_IMAGES = 360


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run, the same on every backend."""

    world_size: int
    epochs: int
    max_norm: float
    learning_rate: float
    momentum: float
    batch_size: int
    seed: int

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Replicate x shard: two copies of everything where the ranks can be halved, one copy otherwise."""
        copies = 2 if self.world_size % 2 == 0 else 1
        return copies, self.world_size // copies


@dataclass(frozen=True, slots=True)
class Images:
    """Pixels in rows, between 0 and 1, and the digit that each row shows."""

    pixels: Floats
    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.intp] | slice) -> Images:
        return Images(self.pixels[rows], self.labels[rows])

    def share(self, rank: int, world_size: int) -> Images:
        """The rows that are this rank's to work on; the shares of all ranks differ by one row at most."""
        return self.take(slice(len(self) * rank // world_size, len(self) * (rank + 1) // world_size))


@dataclass(frozen=True, slots=True)
class Digits:
    """Images to learn from, and images to be judged by."""

    train: Images
    test: Images

    def steps_per_epoch(self, settings: Settings) -> int:
        """How many full batches there are; what is left over waits for the next shuffle."""
        return len(self.train) // settings.batch_size

    def batch(self, settings: Settings, step: int) -> Images:
        """The images of all ranks together in training step ``step``, counted through all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch(settings))
        order = np.random.default_rng((settings.seed, 1, epoch)).permutation(len(self.train))
        return self.train.take(order[place * settings.batch_size : (place + 1) * settings.batch_size])


class Trainer(Protocol):
    """One rank's model and optimizer. Every rank calls the same methods in the same order."""

    rank: int

    def step(self, share: Images) -> tuple[float, float]:
        """Train on this rank's share of a batch.

        Returns:
            The share's part of the batch's loss, such that the mean over all ranks is the loss of the batch,
            and the norm of the batch's gradient before clipping.
        """
        ...

    def count_correct(self, share: Images) -> int:
        """How many digits of this rank's share the model recognises."""
        ...


def load(seed: int) -> Digits:
    """The 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels each, in two random parts."""
    from sklearn.datasets import load_digits  # slow to import, and the ranks are handed its result

    raw = load_digits()
    images = Images((raw.data / 16).astype(np.float32), raw.target.astype(np.int32))
    order = np.random.default_rng((seed, 0)).permutation(len(images))
    return Digits(images.take(order[TEST_IMAGES:]), images.take(order[:TEST_IMAGES]))


def initial_weights(seed: int) -> list[tuple[Floats, Floats]]:
    """Weight (outputs x inputs, as both frameworks keep it) and bias of each layer."""
    generator = np.random.default_rng((seed, 2))
    layers = []
    for inputs, outputs in pairwise(LAYER_SIZES):
        weight = generator.normal(0.0, np.sqrt(1 / inputs), (outputs, inputs)).astype(np.float32)
        layers.append((weight, np.zeros(outputs, np.float32)))
    return layers
