"""Copying a table out of a long text as JSON: every row must be found, and none twice.

The first row is given, to show the form; the cells of the others count.
"""

import random

from oasiskv.evals.tasks.planted import Planted, Sketch
from oasiskv.evals.tasks.words import names, numbers

DIGITS = 3
ROWS = 5
SPARE = 0.2
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)

Row = tuple[str, str, str]


def _rows(rng: random.Random, items: list[str]) -> list[Row]:
    """Item, price and stock of each row; no number comes twice in a table."""
    cells = numbers(rng, 2 * len(items), DIGITS)
    return list(zip(items, cells[::2], cells[1::2], strict=True))


def _cells(rows: list[Row]) -> list[tuple[str, str]]:
    return [
        (item, cell)
        for item, price, stock in rows[1:]
        for cell in (f'"price": {price}', f'"stock": {stock}')
    ]


def _middle(rng: random.Random) -> Sketch:
    """Rows as lines that stand together: what follows a row is the next one."""
    rows = _rows(rng, names(rng, ROWS))
    lines = [f'"item": "{item}", "price": {price}, "stock": {stock}' for item, price, stock in rows]
    answer = ",\n".join(f"{{{line}}}" for line in lines) + "\n]"
    given = answer.index(rows[1][0])
    table = "\n" + "".join(f"{line}\n" for line in lines)
    question = "\nThe table as JSON:\n[\n" + answer[:given]
    return Sketch([table], "", question, answer[given:], _cells(rows))


def _spread(rng: random.Random) -> Sketch:
    """Rows of months, anywhere: which row comes next is known, where it stands is not."""
    first = rng.randrange(len(MONTHS) - ROWS + 1)
    rows = _rows(rng, list(MONTHS[first : first + ROWS]))
    facts = [f"\n{month}: price {price}, stock {stock}\n" for month, price, stock in rows]
    answer = ",\n".join(
        f'"{month}": {{"price": {price}, "stock": {stock}}}' for month, price, stock in rows
    )
    given = answer.index("\n") + 1
    # The row that is given is no needle: another one stands at an even depth.
    facts = [*facts[1:], facts[0]]
    question = "\nThe table as JSON:\n{\n" + answer[:given]
    return Sketch(facts, "", question, answer[given:] + "\n}", _cells(rows))


TASKS = (
    Planted("table_middle", "a table in real text, copied as JSON", _middle, spare=SPARE),
    Planted(
        "table_spread", "a table, its rows all over real text, copied as JSON", _spread, spare=SPARE
    ),
)
