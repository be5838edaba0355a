"""Standard deviations that outliers barely change. In: deviations on the host. Out: their standard deviation."""

from __future__ import annotations

import numpy as np

#: Standard deviation of a normal distribution, relative to its median absolute deviation.
SIGMA_PER_MAD = 1.4826


def robust_deviation(deviations: np.ndarray) -> float:
    """Return 1.4826 times the median magnitude of deviations from a centre. The signs of deviations do not matter."""
    return SIGMA_PER_MAD * float(np.median(np.abs(deviations)))
