"""How a description writes placements, repeats and ranges: ``Shard(0)``, ``layers.{0..31}.wq``, ``0..7``."""

from __future__ import annotations

import re
from itertools import product

from hyper_parallel.core.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard

ACCEPTED_PLACEMENTS = (
    f"Shard(dim), StridedShard(dim, split_factor=n), Replicate(), Partial({'|'.join(REDUCE_OPS)})"
)

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CALL = re.compile(r"(\w+)\s*(?:\(([^()]*)\))?")
_BETWEEN_CALLS = re.compile(r",\s*(?![^()]*\))")
_MAX_REPEATS = 1_000_000


def parse_placements(text: str) -> tuple[Placement, ...]:
    """The placements in a list that is separated by commas.

    Raises:
        ValueError: one of them is not understood; says what is accepted.
    """
    return tuple(_placement(word.strip()) for word in _BETWEEN_CALLS.split(text) if word.strip())


def _placement(text: str) -> Placement:
    match = _CALL.fullmatch(text)
    words = [word.strip() for word in (match.group(2) or "").split(",")] if match else []
    given = [tuple(part.strip() for part in word.rpartition("=")[::2]) for word in words if word]
    name = match.group(1).lstrip("_") if match else ""
    try:
        if name == "Shard":
            return Shard(**_numbers(given, ("dim",)))
        if name == "StridedShard":
            numbers = _numbers(given, ("dim", "split_factor"))
            return StridedShard(numbers["dim"], split_factor=numbers["split_factor"])
        if name == "Replicate" and not given:
            return Replicate()
        if name == "Partial" and len(given) < 2:
            return Partial(given[0][1].strip("'\"") if given else "sum")
    except (KeyError, TypeError, ValueError) as error:
        reason = f" ({error})" if type(error) is ValueError else ""
        raise ValueError(f"{text!r} is no placement{reason}; accepted: {ACCEPTED_PLACEMENTS}") from error
    raise ValueError(f"{text!r} is no placement; accepted: {ACCEPTED_PLACEMENTS}")


def _numbers(given: list[tuple[str, ...]], names: tuple[str, ...]) -> dict[str, int]:
    numbers = {
        name or names[position]: int(value) for position, (name, value) in enumerate(given[: len(names)])
    }
    if len(numbers) != len(names) or len(given) != len(names) or set(numbers) != set(names):
        raise TypeError(f"takes {names}")
    return numbers


def parse_range(text: str) -> tuple[int, ...]:
    """``3`` or ``0..7``, both ends included.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
        raise ValueError(f"{text!r} is no number or range; accepted: 3, or 0..7 for 0 to 7")
    return tuple(range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1))


def expand(fqn: str) -> tuple[str, ...]:
    """The names that ``layers.{0..31}.wq`` stands for; several ranges are multiplied.

    Raises:
        ValueError: braces that hold no range, or more names than a model has.
    """
    pieces = _RANGE.split(fqn)
    if any("{" in piece or "}" in piece for piece in pieces[::3]):
        raise ValueError(f"{fqn!r}: braces hold a range of numbers, as in layers.{{0..31}}.wq")
    ranges = [range(int(low), int(high) + 1) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
    count = 1
    for each in ranges:
        count *= len(each)
    if not 0 < count <= _MAX_REPEATS:
        raise ValueError(f"{fqn!r} stands for {count:,} names; accepted: 1 to {_MAX_REPEATS:,}")
    return tuple(
        pieces[0] + "".join(f"{number}{text}" for number, text in zip(numbers, pieces[3::3], strict=True))
        for numbers in product(*ranges)
    )
