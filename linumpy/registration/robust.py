"""Standard deviations that outliers barely change. In: numbers on the host. Out: a number."""

from __future__ import annotations

import numpy as np

#: Standard deviation of a normal distribution, relative to its median absolute deviation.
SIGMA_PER_MAD = 1.4826


def robust_deviation(deviations: np.ndarray) -> float:
    """Return the robust standard deviation from deviations from a centre, or their magnitudes."""
    return SIGMA_PER_MAD * float(np.median(np.abs(deviations)))
