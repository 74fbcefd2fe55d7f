"""Norm kinds: the statistic of a norm, the operation that combines statistics, and the root that ends it.

=========  ==================  =========  ========  ======
p          statistic           reduced    identity  root
=========  ==================  =========  ========  ======
finite     sum of abs(x)**p    SUM        0         ** 1/p
0          number of nonzeros  SUM        0         none
inf        max of abs(x)       MAX        0         none
-inf       min of abs(x)       MAX of -x  inf       none
=========  ==================  =========  ========  ======
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

EPS = 1e-6
"""What the coefficient adds to the norm before it divides by it, as ``torch.nn.utils.clip_grad_norm_`` does."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """The p-norm of all elements, for any real ``p`` and both infinities.

    Raises:
        ValueError: ``p`` is NaN.
        TypeError: ``p`` is not a number.
    """

    p: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", float(self.p))
        if math.isnan(self.p):
            raise ValueError("norm_type must be a number, inf or -inf, got nan")

    @property
    def reduce_op(self) -> str:
        return "max" if math.isinf(self.p) else "sum"

    @property
    def identity(self) -> float:
        """The statistic of no elements."""
        return math.inf if self.p == -math.inf else 0.0

    @property
    def sign(self) -> int:
        """The statistic travels multiplied by this, so that MAX also finds the smallest."""
        return -1 if self.p == -math.inf else 1

    def root(self, statistic: Any) -> Any:
        """The norm, from the statistic of all elements (a float64 scalar of any array library).

        A count is rounded, as weights like 1/3 leave it a few units in the last place beside an integer.
        """
        if math.isinf(self.p) or self.p == 1:
            return statistic
        if self.p != 0:
            return statistic ** (1 / self.p)
        whole = statistic // 1  # not of the statistic + 0.5, which float32 rounds up from 2**23 on
        return whole + (statistic - whole) * 2 // 1
