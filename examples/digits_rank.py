"""What the ranks run: `digits.py` calls these functions, on all ranks at once, through a ``RankPool``.

The processes live for the whole training and keep the model in ``_training``; the parent asks for a few steps at
a time, so that it can show how the training gets on.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from digits_data import Digits, Images, Settings, Trainer

_TRAINERS = {
    "torch": ("digits_torch", "TorchTrainer"),
    "mindspore": ("digits_mindspore", "MindSporeTrainer"),
}


@dataclass(frozen=True, slots=True)
class _Training:
    settings: Settings
    digits: Digits
    trainer: Trainer

    def share(self, images: Images) -> Images:
        return images.share(self.trainer.rank, self.settings.world_size)


_training: _Training | None = None


def set_up(platform: str, settings: Settings, digits: Digits) -> None:
    """Build this rank's part of the model."""
    global _training
    module, name = _TRAINERS[platform]
    trainer = getattr(importlib.import_module(module), name)(settings)
    _training = _Training(settings, digits, trainer)


def train(first: int, last: int) -> list[tuple[float, float]]:
    """Do steps ``first`` to ``last``, the latter excluded; this rank's loss and the gradient's norm of each."""
    training = _present()
    batches = (training.digits.batch(training.settings, step) for step in range(first, last))
    return [training.trainer.step(training.share(batch)) for batch in batches]


def count_correct() -> int:
    """How many test images of its share this rank recognises."""
    training = _present()
    return training.trainer.count_correct(training.share(training.digits.test))


def _present() -> _Training:
    if _training is None:
        raise RuntimeError("set_up comes first")
    return _training
