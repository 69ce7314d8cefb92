import subprocess
import sys
from pathlib import Path

from oasiskv.config import OasisConfig
from oasiskv.settings_page import settings_page

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def row(name):
    (found,) = (line for line in settings_page().splitlines() if line.startswith(f"| `{name}` "))
    return found


def test_the_page_and_the_config_agree():
    found = PAGE.read_text()
    assert found == settings_page(), "python -m oasiskv.settings_page > docs/settings.md"


def test_every_setting_has_a_row_with_a_description():
    for name in OasisConfig.model_fields:
        cells = row(name).strip("|").split(" | ")
        assert len(cells) == 5
        assert len(cells[4].strip()) > 10


def test_types_bounds_and_choices():
    assert "| float | `2.0` | >= 1, <= 1000000 |" in row("hysteresis")
    assert "| float or None | `0.1` | > 0, <= 1 |" in row("cap_fraction")
    assert "| choice | `always` | `always`, `under_pressure`, `dense` |" in row("mode")
    assert "| choice | `keys4` | `minmax`, `keys4` |" in row("digest")
    lookahead = "| choice | `held_back` | `held_back`, `last_accepted`, `paper` |"
    assert lookahead in row("lookahead")
    assert "| int or None | `None` | >= 0, <= 1073741824 |" in row("threshold_tokens")


def test_the_command_writes_the_page():
    command = [sys.executable, "-m", "oasiskv.settings_page"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout == settings_page()
