"""The catalogue, its page and the dashboard name the same metrics."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oasiskv.metrics.catalog import METRICS, PREFIX
from oasiskv.metrics.page import metrics_page

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
VLLMS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:kv_cache_usage_perc",
}
"""Metrics of vLLM's own that the dashboard shows; the plugin's tests ask a server for them."""


def dashboard():
    return json.loads((DOCS / "grafana" / "oasiskv.json").read_text())


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def names_of(panel):
    words = {word for target in panel["targets"] for word in NAME.findall(target["expr"])}
    return {word for word in words if word.startswith("vllm:")}


def test_the_page_is_that_of_the_catalogue():
    found = (DOCS / "metrics.md").read_text()
    assert found == metrics_page(), "python -m oasiskv.metrics.page > docs/metrics.md"
    rows = [line.split("`")[1] for line in found.splitlines() if line.startswith("| `")]
    assert rows == [metric.name for metric in METRICS]


def test_the_command_writes_the_page():
    command = [sys.executable, "-m", "oasiskv.metrics.page"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout == metrics_page()


def test_links_lead_somewhere():
    for page in (DOCS / "metrics.md", DOCS / "grafana" / "README.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_names_follow_prometheus(metric):
    assert re.fullmatch(r"vllm:oasiskv_[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    unit = metric.unit.split()[0]
    assert unit in metric.name or unit in ("requests", "steps")
    assert len(metric.meaning) > 10
    assert len(metric.advice) > 10


def test_every_metric_is_on_a_panel_and_no_other():
    shown = set().union(*map(names_of, panels()))
    known = {sample for metric in METRICS for sample in metric.samples}
    assert shown - known == VLLMS
    for metric in METRICS:
        assert shown & set(metric.samples), metric.name


def test_every_panel_can_be_drawn():
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken
                assert x < 24
                taken.add((x, y))
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            query = target["expr"]
            assert query.count("(") == query.count(")")
            assert target["datasource"]["uid"] == "${datasource}"
            for name in names_of(panel) & set(NAME.findall(query)):
                assert f'{name}{{model_name=~"$model", engine=~"$engine"' in query


def test_the_prefix_is_one_that_vllm_looks_after():
    assert PREFIX.startswith("vllm:")
