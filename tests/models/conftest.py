"""A cache of its own for every test that asks for one."""

import pytest


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The models folder of a fresh cache."""
    monkeypatch.setenv("OASISKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"
