"""The texts that travel with the package are what their READMEs say."""

import lzma
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


@pytest.mark.parametrize(
    ("name", "start", "characters"),
    [
        ("persuasion_5_24", "Chapter 5\n\nOn the morning appointed", 413_954),
        ("python_code", "# email/feedparser.py\n\n# Copyright (C) 2004-2006 Python", 509_423),
        ("python_manual", 'The "assert" statement\n****', 373_335),
    ],
)
def test_the_packed_texts_are_what_their_readme_says(name, start, characters):
    text = lzma.decompress(data_path(f"texts/{name}.txt.xz").read_bytes()).decode()
    assert text.startswith(start)
    assert len(text) == characters
    assert f"`{name}.txt.xz`" in data_path("texts/README.md").read_text()


def test_the_python_texts_come_with_their_licence():
    licence = data_path("texts/LICENSE.python").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "`LICENSE.python`" in data_path("texts/README.md").read_text()
