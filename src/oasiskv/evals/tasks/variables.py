"""Variables that stand for one another: the answer needs several look-ups in a row."""

import random
from itertools import pairwise

from oasiskv.evals.tasks.planted import Planted, Sketch
from oasiskv.evals.tasks.words import names, numbers

DIGITS = 6
HOPS = 2
CHAINS = 3


def _variables(rng: random.Random) -> Sketch:
    variables = names(rng, CHAINS * (HOPS + 1), "_")
    chains = [
        [*variables[index * (HOPS + 1) : (index + 1) * (HOPS + 1)], value]
        for index, value in enumerate(numbers(rng, CHAINS, DIGITS))
    ]
    facts = [f"\n# {name} = {meaning}\n" for chain in chains for name, meaning in pairwise(chain)]
    asked, *shown = (_printed(chain) for chain in chains)
    given = len(f"\nprint({chains[0][0]}) #")
    parts = [("", meaning) for meaning in chains[0][1:]]
    return Sketch(facts, "".join(shown), asked[:given], asked[given:], parts)


def _printed(chain: list[str]) -> str:
    return "".join(f"\nprint({name}) # {meaning}\n" for name, meaning in pairwise(chain))


TASKS = (
    Planted(
        "variables",
        f"a variable that stands for another, {HOPS} times, then for a number; each counts",
        _variables,
    ),
)
