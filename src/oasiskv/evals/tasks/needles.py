"""Facts about one or several names: the wording is what the 32K model was trained on."""

import random

from oasiskv.evals.tasks.planted import Planted, Sketch
from oasiskv.evals.tasks.words import names, numbers

DIGITS = 6
KEYS = 8
WANTED = 3

_FACT = "\nThe special number of {} is {}.\n"


def _facts(keys: list[str], values: list[str]) -> list[str]:
    return [_FACT.format(key, value) for key, value in zip(keys, values, strict=True)]


def _passkey(rng: random.Random) -> Sketch:
    (value,) = numbers(rng, 1, DIGITS)
    fact = f"\nThe pass key is {value}. Remember it. {value} is the pass key.\n"
    return Sketch([fact], "", "\nWhat is the pass key? The pass key is", f" {value}", [])


def _keys(rng: random.Random) -> Sketch:
    keys, values = names(rng, KEYS), numbers(rng, KEYS, DIGITS)
    question = f"\nQuestion: What is the special number of {keys[0]}?\nAnswer: "
    return Sketch(_facts(keys, values), "", question, values[0], [])


def _values(rng: random.Random) -> Sketch:
    shown, asked, *others = names(rng, KEYS - 2 * (WANTED - 1))
    values = numbers(rng, KEYS, DIGITS)
    keys = [asked] * WANTED + [shown] * WANTED + others
    wanted, example = values[:WANTED], values[WANTED : 2 * WANTED]
    ask = "\nQuestion: What are all the special numbers of {}?\nAnswer: "
    return Sketch(
        _facts(keys, values),
        ask.format(shown) + ", ".join(example) + "\n",
        ask.format(asked),
        ", ".join(wanted),
        [("", value) for value in wanted],
    )


def _queries(rng: random.Random) -> Sketch:
    keys, values = names(rng, KEYS), numbers(rng, KEYS, DIGITS)
    pairs = list(zip(keys, values, strict=True))[:WANTED]
    lines = "\n".join(f"The special number of {key} is {value}." for key, value in pairs)
    # The answer's beginning, up to the first number, shows what form is wanted.
    given = len(lines[: lines.index(values[0])].rstrip())
    listed = ", ".join(keys[: WANTED - 1]) + f" and {keys[WANTED - 1]}"
    ask = f"\nQuestion: What are the special numbers of {listed}?\nAnswer:\n"
    parts = [("", values[0]), *pairs[1:]]
    return Sketch(_facts(keys, values), "", ask + lines[:given], lines[given:], parts)


def _turns(rng: random.Random) -> Sketch:
    keys, values = names(rng, KEYS), numbers(rng, KEYS, DIGITS)
    turns = [
        f"\nQuestion: What is the special number of {key}?\nAnswer: {value}\n"
        for key, value in zip(keys, values, strict=True)
    ]
    # The last one's number is left to be answered; the others are asked and answered before it.
    last = turns[0].removesuffix(f"{values[0]}\n")
    return Sketch(_facts(keys, values), "", "".join([*turns[1:WANTED], last]), values[0], [])


TASKS = (
    Planted("passkey", "one number in a paragraph that comes over and over", _passkey, real=False),
    Planted("needle_keys", f"{KEYS} facts in real text, one asked for", _keys),
    Planted("needle_values", f"{WANTED} facts about one name, all asked for", _values),
    Planted("needle_queries", f"facts about {WANTED} names, asked for at once", _queries),
    Planted("needle_turns", f"facts about {WANTED} names, asked for one after another", _turns),
)
