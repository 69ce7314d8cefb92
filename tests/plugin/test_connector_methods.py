"""Each method that vLLM may call on a connector: ours, or left to vLLM's for a reason."""

import re
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from oasiskv.vllm.connector import OasisConnector

pytestmark = pytest.mark.smoke

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
SECTION = PAGE.read_text().partition("\n## Methods of the connector\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in SECTION.splitlines()
    if line.startswith("| `")
]
WHAT = {name: what for names, what in ROWS for name in re.findall(r"`(\w+)`", names)}
"""Method -> what the page says of it."""


def methods(*classes):
    """Names that are for others to call, or to read."""
    names = {name for one in classes for name in vars(one)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(methods(KVConnectorBase_V1, SupportsHMA)))
def test_the_page_says_what_becomes_of_it(name):
    """What is new in a version of vLLM fails here: the base class may answer it in silence."""
    assert WHAT[name].startswith("left: ") != (name in vars(OasisConnector))


def test_the_connector_has_no_others():
    """A name that vLLM no longer calls, or never did, is in no version's base class."""
    assert methods(OasisConnector) <= WHAT.keys()
    assert len(ROWS) == len({names for names, _ in ROWS})


def test_tokens_from_the_store_are_hits_in_host_memory():
    """vLLM before 0.32 does not ask."""
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    connector = object.__new__(OasisConnector)
    assert connector.get_external_cache_hit_sources(None, 32) == {sources.HOST: 32}
    assert connector.get_external_cache_hit_sources(None, 0) == {}
