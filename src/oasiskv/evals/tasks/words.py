"""Names and numbers that facts are made of."""

import random

# The words whose pairs the 32K model was trained to look up (its README).
WORDS = (
    *("apple", "river", "stone", "cloud", "tiger", "lamp", "violin", "garden", "copper", "planet"),
    *("window", "silver", "forest", "bridge", "candle", "desert", "eagle", "feather", "glacier"),
    *("harbor", "island", "jungle", "kettle", "lantern", "marble", "needle", "ocean", "pepper"),
    *("quartz", "ribbon", "saddle", "tunnel", "umbrella", "valley", "walnut", "yellow", "zebra"),
    *("anchor", "basket", "cactus", "dragon", "engine", "falcon", "guitar", "hammer", "iceberg"),
    *("jacket", "kingdom", "ladder", "magnet", "napkin", "orchid", "pillow", "rocket", "shadow"),
    "temple",
)


def names(rng: random.Random, count: int, sep: str = " ") -> list[str]:
    """Two-word names that differ; more than the words allow raises ValueError."""
    pairs = [(first, second) for first in WORDS for second in WORDS if first != second]
    return [sep.join(pair) for pair in rng.sample(pairs, count)]


def numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """Numbers of so many digits that differ, none beginning with 0."""
    return [str(value) for value in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
