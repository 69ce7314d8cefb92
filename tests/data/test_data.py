"""The texts that travel with the package are what their READMEs say."""

import re

import pytest

from oasiskv.data import data_path

FACT = re.compile(r"\n\nThe special number of (\w+ \w+) is (\d{6})\.\n\n")


def test_the_demo_is_the_novel_with_three_facts_and_a_question():
    document = data_path("demo/document.txt").read_text()
    body, question = document.split("Question: ")
    assert FACT.findall(body) == [
        ("violin cloud", "482913"),
        ("copper lantern", "730562"),
        ("glacier saddle", "159847"),
    ]
    assert question == "What is the special number of copper lantern?\nAnswer: "
    depths = [match.start() / len(document) for match in FACT.finditer(document)]
    assert depths == pytest.approx([0.15, 0.5, 0.85], abs=0.04)
    prose = FACT.sub("\n\n", body).strip()
    assert data_path("texts/persuasion.txt").read_text().startswith(prose)


def test_the_novel_is_plain_prose():
    text = data_path("texts/persuasion.txt").read_text()
    assert text.isascii()
    assert text.startswith("Chapter 1\n\nSir Walter Elliot, of Kellynch Hall")
    assert 40_000 < len(text) < 60_000


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"texts/nothing\.txt"):
        data_path("texts/nothing.txt")
