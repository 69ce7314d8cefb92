"""Wanted blocks of real runs in files, to study stores, links and schedulers without a model."""

from oasiskv.trace.format import Trace, TraceStep, write_trace
from oasiskv.trace.names import read_trace
from oasiskv.trace.replay import replay
from oasiskv.trace.stats import TraceStats, measure

__all__ = ["Trace", "TraceStats", "TraceStep", "measure", "read_trace", "replay", "write_trace"]
