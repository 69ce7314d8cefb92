"""Every impossible setting is refused in one line that says what would be legal."""

import math

import pytest
from pydantic import ValidationError

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.errors import ConfigError
from oasiskv.setting_types import type_of

MULTIPLE = "it must be a multiple of the block (16 tokens), at least"

REFUSED = [
    ({"budget_tokens": 0}, f"budget_tokens=0 is not legal: {MULTIPLE} 16"),
    ({"budget_tokens": -16}, f"budget_tokens=-16 is not legal: {MULTIPLE} 16"),
    ({"budget_tokens": 40}, f"budget_tokens=40 is not legal: {MULTIPLE} 16"),
    ({"hot_tokens": 3080}, f"hot_tokens=3080 is not legal: {MULTIPLE} 16"),
    (
        {"budget_tokens": 64, "hot_tokens": 48},
        "hot_tokens=48 is not legal: the hot set must hold the budget, so at least "
        "budget_tokens=64",
    ),
    ({"window_tokens": 0}, f"window_tokens=0 is not legal: {MULTIPLE} 16"),
    ({"window_tokens": 15}, f"window_tokens=15 is not legal: {MULTIPLE} 16"),
    ({"sink_tokens": -16}, f"sink_tokens=-16 is not legal: {MULTIPLE} 0"),
    ({"sink_tokens": 8}, f"sink_tokens=8 is not legal: {MULTIPLE} 0"),
    (
        {"threshold_tokens": -1},
        "threshold_tokens=-1 is not legal: it must be greater than or equal to 0",
    ),
    ({"minmax_mix": -0.5}, "minmax_mix=-0.5 is not legal: it must be greater than or equal to 0"),
    ({"minmax_mix": 1.5}, "minmax_mix=1.5 is not legal: it must be less than or equal to 1"),
    ({"cap_fraction": 0}, "cap_fraction=0 is not legal: it must be greater than 0"),
    ({"cap_fraction": 1.5}, "cap_fraction=1.5 is not legal: it must be less than or equal to 1"),
    (
        {"host_gib": 1e300},
        "host_gib=1e+300 is not legal: it must be less than or equal to 131072",
    ),
    ({"hysteresis": 0.5}, "hysteresis=0.5 is not legal: it must be greater than or equal to 1"),
    ({"hysteresis": math.inf}, "hysteresis=inf is not legal: it must be a finite number"),
    ({"host_gib": 0}, "host_gib=0 is not legal: it must be greater than 0"),
    ({"host_gib": math.inf}, "host_gib=inf is not legal: it must be a finite number"),
    ({"draft_tokens": 0}, "draft_tokens=0 is not legal: it must be greater than or equal to 1"),
    ({"draft_tokens": 65}, "draft_tokens=65 is not legal: it must be less than or equal to 64"),
    ({"prefill_tokens": 0}, "prefill_tokens=0 is not legal: it must be greater than or equal to 1"),
    ({"transfer_timeout_s": 0}, "transfer_timeout_s=0 is not legal: it must be greater than 0"),
    (
        {"mode": "auto"},
        "mode='auto' is not legal: it must be 'always', 'under_pressure' or 'dense'",
    ),
    ({"digest": "mean"}, "digest='mean' is not legal: it must be 'minmax' or 'keys4'"),
    (
        {"lookahead": "next"},
        "lookahead='next' is not legal: it must be 'held_back', 'last_accepted' or 'paper'",
    ),
    (
        {"budget_tokens": "many"},
        "budget_tokens='many' is not legal: it must be a valid integer, unable to parse string as "
        "an integer",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_refused_in_one_line_with_setting_value_and_what_is_legal(settings, message):
    with pytest.raises(ConfigError) as caught:
        OasisConfig(**settings)
    assert str(caught.value) == message


def test_unknown_setting_is_named_beside_all_known_ones():
    with pytest.raises(ConfigError) as caught:
        OasisConfig(budget=512)
    known = ", ".join(sorted(OasisConfig.model_fields))
    assert str(caught.value) == f"unknown setting budget=512; known settings: {known}"


@pytest.mark.parametrize("settings", [{"bud\nget": 1}, {"digest": "min\nmax"}])
def test_a_line_break_in_a_setting_stays_out_of_the_message(settings):
    with pytest.raises(ConfigError) as caught:
        OasisConfig(**settings)
    assert len(str(caught.value).splitlines()) == 1


NUMBERS = [name for name, field in OasisConfig.model_fields.items() if type_of(field)[0] in "fi"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite_and_bounded(name):
    absurd = [math.nan, math.inf, -math.inf, 1e300, -1e300, 10**400, 2**31, -1, "1e300", "9" * 400]
    for value in absurd:
        with pytest.raises(ConfigError, match=f"^{name}=.* is not legal: ") as caught:
            OasisConfig(**{name: value})
        assert len(str(caught.value)) < 250
        assert "\n" not in str(caught.value)


def test_all_numbers_are_tried():
    assert {"budget_tokens", "threshold_tokens", "host_gib", "minmax_mix"} < set(NUMBERS)


def test_the_cause_of_a_refusal_is_not_printed_as_well():
    with pytest.raises(ConfigError) as caught:
        OasisConfig(mode="auto")
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "settings",
    [
        {"budget_tokens": 16, "hot_tokens": 16, "window_tokens": 16},
        {"sink_tokens": 0, "threshold_tokens": 0},
        {"minmax_mix": 0},
        {"minmax_mix": 1, "hysteresis": 1, "cap_fraction": 1},
        {"cap_fraction": None, "host_gib": None, "threshold_tokens": None},
        {"draft_tokens": 1},
        {"draft_tokens": 64},
    ],
)
def test_the_edge_of_what_is_legal_is_legal(settings):
    config = OasisConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize("mode", list(LookaheadMode))
def test_lookahead_takes_the_mode_or_its_name(mode):
    assert OasisConfig(lookahead=mode.value).lookahead is mode
    assert OasisConfig(lookahead=mode).lookahead is mode


def test_defaults_give_a_hot_set_larger_than_the_budget():
    config = OasisConfig()
    assert config.hot_tokens >= 1.5 * config.budget_tokens


def test_sizes_in_blocks():
    config = OasisConfig(budget_tokens=48, hot_tokens=80, sink_tokens=32, window_tokens=64)
    assert config.budget_blocks == 3
    assert config.hot_blocks == 5
    assert config.sink_blocks == 2
    assert config.window_blocks == 4


@pytest.mark.parametrize(
    ("fraction", "blocks"),
    [(None, 10), (1.0, 10), (0.5, 5), (0.25, 2), (0.19, 1), (0.01, 1)],
)
def test_cap_is_a_share_of_the_budget_and_at_least_one_block(fraction, blocks):
    config = OasisConfig(budget_tokens=160, hot_tokens=160, cap_fraction=fraction)
    assert config.cap_blocks == blocks


def test_threshold_defaults_to_all_that_stays_and_one_block():
    config = OasisConfig(budget_tokens=32, hot_tokens=48, sink_tokens=16, window_tokens=64)
    assert config.resolved_threshold_tokens == 16 + 48 + 64 + BLOCK_TOKENS


@pytest.mark.parametrize("tokens", [0, 1000])
def test_threshold_given_is_the_threshold(tokens):
    assert OasisConfig(threshold_tokens=tokens).resolved_threshold_tokens == tokens


@pytest.mark.parametrize("name", ["mode", "budget_tokens", "lookahead"])
def test_settings_cannot_be_changed(name):
    config = OasisConfig()
    before = config.model_dump()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, name, before[name])
    with pytest.raises(ValidationError, match="frozen"):
        delattr(config, name)
    assert config.model_dump() == before


def test_a_changed_copy_leaves_the_original_alone():
    config = OasisConfig(budget_tokens=32, hot_tokens=48)
    changed = config.model_copy(update={"hot_tokens": 64})
    assert (changed.budget_tokens, changed.hot_tokens) == (32, 64)
    assert config.hot_tokens == 48
    assert changed.model_fields_set == {"budget_tokens", "hot_tokens"}


@pytest.mark.parametrize("update", [{"hot_tokens": 16}, {"budget_tokens": 40}, {"hot": 64}])
def test_a_changed_copy_is_validated_too(update):
    config = OasisConfig(budget_tokens=32, hot_tokens=48)
    with pytest.raises(ConfigError):
        config.model_copy(update=update)
