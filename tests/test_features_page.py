"""The table of features names a test for each row, and the tests' cases have a row each."""

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "features.md"
PLUGIN = Path(__file__).parent / "plugin"
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| feature "))
]
CASES = {"test_features.py": ("FEATURES", "NOT_WITH_DRAFTS"), "test_shapes.py": ("MODELS",)}
"""Test file -> its dicts of cases by name."""


def named_tests(cell):
    """``(file, test, case or none)`` of each test that a cell names."""
    return re.findall(r"`(test_\w+\.py)::(test_\w+)`(?: \(([^)]+)\))?", cell)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_says_what_becomes_of_the_feature_and_by_which_test(row):
    _, what, cell = row
    assert re.match(r"(works|stays dense|refused|not in vLLM)\b", what)
    assert named_tests(cell)
    for file, test, _ in named_tests(cell):
        source = (PLUGIN / file).read_text()
        names = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
        assert test in names
        if what.startswith("refused"):
            [message] = re.findall('"([^"]+)"', what)
            assert message in source


@pytest.mark.parametrize("file", CASES)
def test_each_case_has_one_row(file):
    tree = ast.parse((PLUGIN / file).read_text())
    dicts = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    cases = [key.value for name in CASES[file] for key in dicts[name].keys]
    named = [case for row in ROWS for found, _, case in named_tests(row[-1]) if found == file]
    assert sorted(cases) == sorted(filter(None, named))
