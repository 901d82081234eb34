"""Are two samples of one distribution?"""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy import stats

LEVEL = 1e-3
"""Of a whole test: a lossless engine fails one run in a thousand."""


def g_test(a: Counter[int], b: Counter[int], least: int = 10) -> float:
    """p-value of two samples being of one distribution; rare tokens are pooled."""
    common = [token for token in a | b if a[token] + b[token] >= least]
    table = np.array(
        [[side[token] for token in common] + [side.total() - sum(side[t] for t in common)] for side in (a, b)]
    )
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return 1.0
    return float(stats.chi2_contingency(table, lambda_="log-likelihood").pvalue)
