"""What vLLM's registry and its log line say, against what was seen to happen."""

from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram

from oasiskv.metrics.catalog import METRICS, PREFIX
from oasiskv.vllm import runtime
from oasiskv.vllm.connector import OasisConnector
from oasiskv.vllm.prom import OasisPromMetrics
from oasiskv.vllm.stats import SCHEDULER, OasisStats, build_stats
from plugin.driver import Driver
from plugin.probe import probed
from tiny import prompt_of

SMALL = {
    "budget_tokens": 64,
    "hot_tokens": 96,
    "threshold_tokens": 160,
    "cap_fraction": 0.5,
    "host_gib": 0.0625,
}
SLOTS, SINK, WINDOW = 6, 1, 1
TYPES = {PromGauge: PromGauge, PromCounter: PromCounter, PromHistogram: PromHistogram}


def value(key, **labels):
    """Of the registry, over what labels are not given."""
    found = [
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == PREFIX + key and labels.items() <= sample.labels.items()
    ]
    assert found, key
    return sum(found)


class Watch(Driver):
    """A driver that counts what its requests do, from the runtime's own records.

    Attributes:
        wanted: tiles wanted so far.
        sparse_steps: steps with a sparse request.
    """

    def __init__(self, probe):
        super().__init__(probe)
        self.wanted = self.sparse_steps = 0
        probe.runtime.observer = self.observe

    def observe(self, record):
        if record.wanted is not None:
            self.wanted += int((record.wanted >= 0).sum())

    def step(self, count=1):
        for _ in range(count):
            sparse = any(state.window_start for state in self.probe.state.admitted.values())
            super().step()
            self.sparse_steps += sparse
            self.assert_gauges()

    def assert_gauges(self):
        """Gauges, against vLLM's pool and the requests."""
        states = self.probe.state.admitted.values()
        sparse = sum(state.window_start > 0 for state in states)
        assert value("requests", state="sparse") == sparse
        assert value("requests", state="dense") == len(states) - sparse
        blocks = sum(-(-state.request.num_computed_tokens // 16) for state in states)
        assert value("context_blocks") == blocks
        if not self.probe.state.moved:
            assert value("resident_blocks") == self.probe.used
        store = self.probe.state.store
        assert value("store_blocks") == store.capacity_blocks
        assert value("store_blocks", state="kept") == store.kept_blocks
        assert value("store_promised_blocks") == self.probe.state.promised


@pytest.fixture(params=["one by one", "at once"])
def batched(request, monkeypatch):
    if request.param == "at once":
        monkeypatch.setattr(runtime, "BATCHED_ON", {"cpu"})
    return request.param == "at once"


def test_the_registry_says_what_happened(tiny_folder, batched):
    args = {"disable_log_stats": False, "enable_prefix_caching": False, "max_num_seqs": 3}
    with probed(tiny_folder, refetch=False, settings=SMALL, **args) as probe:
        before = {metric.key: value(metric.samples[-1][len(PREFIX) :]) for metric in METRICS}
        assert not any(before.values())
        driver = Watch(probe)
        for index, length in enumerate((100, 300, 240, 280, 30)):
            driver.add(str(index), prompt_of(length, seed=index), 40)
        driver.step(6)
        sparse = [state for state in probe.state.admitted.values() if state.window_start]
        assert len(sparse) == 2
        assert value("resident_blocks", state="sparse") == 2 * (SLOTS + SINK + WINDOW + 1)
        driver.finish()
        target = probe.runtime.target
        traffic = target.traffic()
        assert value("transitions_total") == 3
        assert value("sparse_steps_total") == driver.sparse_steps > 40
        assert value("wanted_tiles_total") == driver.wanted == traffic.wanted_tiles > 1000
        assert value("missed_tiles_total") == traffic.missed_tiles
        assert value("fetched_tiles_total") == traffic.fetched_tiles > 100
        moved = traffic.fetched_tiles * target.geometry.tile_bytes
        assert value("fetched_bytes_total") == moved
        assert moved <= value("fetch_cap_bytes_total") < 4 * moved
        assert value("block_bytes") == target.geometry.block_bytes
        assert value("refusals_total") == 0
        waits, compared = value("transfer_wait_seconds_count"), value("compared_tiles_total")
        if batched:
            # Nothing runs aside on a CPU, and nobody scores twice.
            assert waits == compared == 0
        else:
            # A request's first sparse step has nothing to wait for.
            assert driver.sparse_steps - 3 <= waits <= driver.sparse_steps
            assert value("transfer_wait_seconds_sum") > 0
            assert compared > value("agreeing_tiles_total") > 0
        assert value("requests") == value("context_blocks") == value("resident_blocks") == 0


def test_the_store_of_prefixes_and_its_limits(tiny_folder):
    # 1 MiB: 64 blocks; a request of 300 + 40 tokens may come to 21.
    settings = SMALL | {"host_gib": 1 / 1024}
    args = {"disable_log_stats": False, "num_gpu_blocks_override": 44, "max_model_len": 420}
    with probed(tiny_folder, refetch=False, settings=settings, **args) as probe:
        assert probe.state.store.capacity_blocks == 64
        driver = Driver(probe)
        for index in range(4):
            driver.add(str(index), prompt_of(300, seed=index), 40)
        driver.finish()
        assert value("refusals_total", reason="store") > 0
        assert value("refusals_total", reason="pool") > 0
        assert value("refusals_total", reason="late") == 0
        queried = value("prefix_queried_blocks_total")
        assert queried == 4 * (299 // 16)
        assert value("prefix_hit_blocks_total") == value("loaded_blocks_total") == 0
        # Its first blocks went from vLLM's pool and are in the store.
        driver.add("again", prompt_of(300, seed=1), 8)
        driver.finish()
        assert value("prefix_queried_blocks_total") == queried + 299 // 16
        assert value("prefix_hit_blocks_total") == 299 // 16
        assert 0 < value("loaded_blocks_total") <= 299 // 16


def test_without_log_stats_nothing_piles_up(tiny_folder):
    with probed(tiny_folder, refetch=False, settings=SMALL) as probe:
        driver = Driver(probe)
        driver.add("0", prompt_of(300), 20)
        driver.finish()
        assert not probe.state.counts
        assert not any(probe.runtime.meter.take().combined().counts.values())


def stats_of(source, waits=(), **counts):
    return OasisStats.of(source, counts, {"block_bytes": 100}, waits)


def test_workers_add_up_and_the_slowest_counts():
    step = stats_of("worker 0", [0.1], fetched_bytes=10)
    step = step.aggregate(stats_of("worker 1", [0.3], fetched_bytes=20))
    scheduler = OasisStats.of(SCHEDULER, {"sparse_steps": 1}, {"requests.sparse": 2})
    step = step.aggregate(scheduler)
    assert step.combined() == (
        {"fetched_bytes": 30, "sparse_steps": 1},
        {"block_bytes": 200, "requests.sparse": 2},
        [0.3],
    )
    # A second step, as the log line adds it: gauges are those of the later one.
    later = build_stats({name: dict(part) for name, part in step.data.items()})
    later.data[SCHEDULER]["gauges"] = {"requests.sparse": 5}
    both = OasisStats().aggregate(step).aggregate(later)
    assert both.combined() == (
        {"fetched_bytes": 60, "sparse_steps": 2},
        {"block_bytes": 200, "requests.sparse": 5},
        [0.3, 0.3],
    )
    assert step.combined().waits == [0.3]
    both.reset()
    assert both.is_empty()


def test_the_log_line():
    part = OasisStats.of(
        SCHEDULER,
        {"sparse_steps": 4, "refusals.store": 1, "refusals.pool": 2},
        {"requests.sparse": 3, "store_blocks.used": 1, "store_blocks.free": 3},
    )
    worker = {"fetched_bytes": 2**22, "fetch_cap_bytes": 2**23}
    worker |= {"wanted_tiles": 100, "missed_tiles": 10}
    line = part.aggregate(OasisStats.of("worker 0", worker, {}, [0.002, 0.004])).reduce()
    assert line == {
        "sparse requests": 3,
        "dense requests": 0,
        "transitions": 0,
        "refusals": 3,
        "fetched MiB per step": 1.0,
        "cap MiB per step": 2.0,
        "hits %": 90.0,
        "wait ms per step": 3.0,
        "store used %": 25.0,
    }
    assert OasisStats().reduce()["sparse requests"] == 0


def test_engines_have_samples_of_their_own(monkeypatch):
    made = {}

    class Fake:
        def __init__(self, name, labelnames, **settings):
            made[name] = self
            self.names, self.seen, self.settings = labelnames, Counter(), settings

        def labels(self, *labels):
            assert len(labels) == len(self.names)
            return SimpleNamespace(**dict.fromkeys(("inc", "set", "observe"), self.note(labels)))

        def note(self, labels):
            def note(number):
                self.seen[labels] += number

            return note

    config = SimpleNamespace(kv_transfer_config=None)
    types = dict.fromkeys(TYPES, Fake)
    engines = {0: ["m", "0"], 1: ["m", "1"]}
    prom = OasisPromMetrics(config, types, ["model_name", "engine"], engines)
    assert made.keys() == {metric.name for metric in METRICS}
    prom.observe(stats_of("worker 0", [0.5], fetched_bytes=7).data, 1)
    prom.observe(OasisStats.of(SCHEDULER, {"refusals.pool": 2}, {"requests.dense": 1}).data, 0)
    assert made[PREFIX + "fetched_bytes_total"].seen == {("m", "1"): 7}
    assert made[PREFIX + "transfer_wait_seconds"].seen == {("m", "1"): 0.5}
    assert made[PREFIX + "refusals_total"].seen == {("m", "0", "pool"): 2}
    assert made[PREFIX + "requests"].seen == {("m", "0", "dense"): 1}
    # Front-ends do not add up what they say of one engine.
    assert made[PREFIX + "requests"].settings["multiprocess_mode"] == "mostrecent"
    monkeypatch.setenv("OASISKV_DISABLE", "1")
    assert OasisConnector.build_prom_metrics(config, types, [], {}) is None
