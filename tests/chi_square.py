"""One chi-square test for the sampled output of both engines."""

from scipy.stats import chisquare


def p_value(counts, expected) -> float:
    """Chi-square over single cells expected at least 5 times, the rest put together.

    ``counts`` are draws per cell and ``expected`` their probabilities, tensors of one shape.
    """
    expected = expected * counts.sum()
    single = expected >= 5
    rest = expected[~single].sum()
    return chisquare(
        [*counts[single].tolist(), float(counts[~single].sum())],
        [*expected[single].tolist(), float(rest)],
        sum_check=False,
    ).pvalue
