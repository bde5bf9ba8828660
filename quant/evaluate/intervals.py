"""How far a mean over tokens may be from that of another sample of the same text."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from narrowgauge.quant.evaluate.report import Interval

_LEVEL = 0.95


def over_windows(values: torch.Tensor, counts: Sequence[int]) -> Interval | None:
    """The 95 % interval of the mean of `values` [N], with windows of counts[s] tokens as the units that were sampled.

    Neighbouring tokens depend on one another, so that N independent values would give an interval much too narrow: the
    variance is that of the ratio of window sums to window counts (W. G. Cochran, Sampling Techniques, 3rd ed., 6.3), the
    quantile Student's t with one degree of freedom less than windows. None for fewer than two windows, or where a value
    is not finite. It says nothing of text of another kind.
    """
    windows = len(counts)
    assert sum(counts) == len(values)
    if windows < 2 or not bool(torch.isfinite(values).all()):
        return None
    from scipy.stats import t

    sums = np.array([part.sum().item() for part in torch.split(values.double(), list(counts))])
    mean = sums.sum() / len(values)
    residuals = sums - mean * np.asarray(counts)
    error = math.sqrt(windows / (windows - 1) * float((residuals**2).sum())) / len(values)
    reach = float(t.ppf((1 + _LEVEL) / 2, windows - 1)) * error
    return Interval(low=float(mean) - reach, high=float(mean) + reach)
