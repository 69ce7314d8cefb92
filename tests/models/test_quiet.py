"""The conversion is silent but for our own bar, and leaves transformers' settings alone."""

import sys

import pytest
from transformers.utils import logging as transformers_logging

from oasiskv.models.progress import progress_bar
from oasiskv.models.quiet import quiet_transformers


def settings():
    return transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()


def fail_quietly():
    with quiet_transformers():
        assert settings() == (transformers_logging.ERROR, False)
        raise KeyError


def test_settings_come_back_after_an_error():
    before = settings()
    with pytest.raises(KeyError):
        fail_quietly()
    assert settings() == before


def test_our_bar_is_seen_and_theirs_is_not(capsys):
    with progress_bar("tiny") as report, quiet_transformers():
        sys.stderr.write("a bar of theirs")
        report("reading", 0.5)
    seen = capsys.readouterr()
    assert "tiny: ready" in seen.err
    assert "theirs" not in seen.err
    assert seen.out == ""
