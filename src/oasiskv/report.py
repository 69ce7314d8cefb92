"""What one generation did, for a person, for a program, and as a picture."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from oasiskv.errors import ConfigError

_MIB = 2**20


@dataclass(frozen=True)
class GenerationReport:
    """Measurements of one finished request.

    Args:
        text: decoded output.
        token_ids: its tokens.
        prompt_tokens: tokens of the prompt.
        dense_kv_bytes: KV that dense decoding would hold at the end.
        fast_tier_kv_bytes: KV held in the fast tier at the end, from storages.
        digest_bytes: digest pool, from its storages.
        store_bytes: host store, from its storage.
        fetched_bytes_per_step: bytes store -> slots, per sparse step.
        cap_bytes_per_step: most bytes that a step may fetch.
        hit_rate: share of wanted blocks that were in a slot already; None if nothing was wanted.
        agreement: share of predicted blocks that the step's own query would have chosen; None if
            not measured.
        tokens_per_step: mean tokens gained per decode step.
        hit_rate_by_layer: ``hit_rate`` of each full-attention layer.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    dense_kv_bytes: int
    fast_tier_kv_bytes: int
    digest_bytes: int
    store_bytes: int
    fetched_bytes_per_step: list[int]
    cap_bytes_per_step: int
    hit_rate: float | None
    agreement: float | None
    tokens_per_step: float
    hit_rate_by_layer: list[float]

    def as_json(self) -> dict[str, Any]:
        """One object of plain values."""
        return asdict(self)

    def as_table(self) -> Table:
        """One table for the terminal."""
        table = Table(title="OasisKV", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(justify="right")
        ratio = self.dense_kv_bytes / max(1, self.fast_tier_kv_bytes)
        fetched = self.fetched_bytes_per_step
        mean = sum(fetched) / max(1, len(fetched))
        rows = [
            ("tokens", f"{self.prompt_tokens} prompt + {len(self.token_ids)} new"),
            ("KV, dense", _mib(self.dense_kv_bytes)),
            ("KV, fast tier", f"{_mib(self.fast_tier_kv_bytes)}  (dense / {ratio:.2f})"),
            ("digests, fast tier", _mib(self.digest_bytes)),
            ("host store", _mib(self.store_bytes)),
            (
                "fetched per step",
                f"mean {_mib(mean)}, most {_mib(max(fetched, default=0))}, "
                f"cap {_mib(self.cap_bytes_per_step)}",
            ),
            ("hit rate", _percent(self.hit_rate)),
            ("prediction agreement", _percent(self.agreement)),
            ("tokens per step", f"{self.tokens_per_step:.2f}"),
        ]
        for name, value in rows:
            table.add_row(name, value)
        return table

    def plot(self, path: Path) -> None:
        """Hit rate by layer, and bytes per step over time, as a picture.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise ConfigError(
                "--plot needs matplotlib: pip install 'oasiskv[plot]' (or leave --plot out)"
            ) from error
        figure = Figure(figsize=(10, 4), layout="constrained")
        by_layer, over_time = figure.subplots(1, 2)
        by_layer.bar(range(len(self.hit_rate_by_layer)), self.hit_rate_by_layer)
        by_layer.set(xlabel="layer", ylabel="hit rate", ylim=(0, 1), title="Hit rate by layer")
        over_time.plot([b / _MIB for b in self.fetched_bytes_per_step], label="fetched")
        over_time.axhline(self.cap_bytes_per_step / _MIB, ls="--", color="gray", label="cap")
        over_time.set(xlabel="sparse step", ylabel="MiB", title="Bytes per step")
        over_time.set_ylim(bottom=0)
        over_time.xaxis.set_major_locator(MaxNLocator(integer=True))
        over_time.legend()
        figure.savefig(path)


def _mib(count: float) -> str:
    return f"{count / _MIB:.2f} MiB"


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"
