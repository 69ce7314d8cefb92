"""How well each digest stands for a block's keys, on the model's own queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.selection import top_blocks
from oasiskv.hf.engine import Engine
from oasiskv.hf.loading import LoadedModel
from oasiskv.ops.digest.reference import build_keys4, build_minmax
from oasiskv.ops.score.reference import block_scores, key_logits, keys4_logits, minmax_logits
from oasiskv.stores.host import HostStore


@dataclass(frozen=True)
class DigestQuality:
    """What a digest finds of what exact keys find, means over texts, layers, heads and queries.

    Args:
        name: the digest.
        kv_share: its bytes as a share of the KV in two-byte elements.
        recall: share of the exact top K that is in its own top K.
        mass: share of the attention over the candidates that its top K covers.
        worst_recall: recall of the worst layer.
    """

    name: str
    kv_share: float
    recall: float
    mass: float
    worst_recall: float


@torch.no_grad()
def run(
    loaded: LoadedModel, texts: Sequence[Sequence[int]], budget_tokens: int
) -> list[DigestQuality]:
    """Score the candidate blocks of each text with its last queries, with every digest.

    Args:
        loaded: the model.
        texts: token ids, each longer than sink, window and budget together.
        budget_tokens: K.
    """
    scored = [_scores(loaded, text) for text in texts]
    budget = budget_tokens // loaded.geometry.block_tokens
    shares = _kv_shares(loaded)
    qualities = []
    for name, share in shares.items():
        recalls, masses = [], []
        for scores in scored:
            exact = scores["exact keys"]
            best, found = top_blocks(exact, budget), top_blocks(scores[name], budget)
            recalls.append((best & found).sum(-1) / best.sum(-1))
            masses.append((exact * found).sum(-1))
        by_layer = torch.stack([recall.mean(dim=-1) for recall in recalls])
        mass = mean(float(mass.mean()) for mass in masses)
        worst = float(by_layer.mean(dim=0).min())
        qualities.append(DigestQuality(name, share, float(by_layer.mean()), mass, worst))
    return qualities


def _kv_shares(loaded: LoadedModel) -> dict[str, float]:
    """Digests compared -> their bytes as a share of the KV in two-byte elements."""
    tile = torch.zeros(loaded.geometry.tile_shape, dtype=torch.bfloat16)
    minmax = build_minmax(tile).nbytes / tile.nbytes
    keys4 = sum(part.nbytes for part in build_keys4(tile)) / tile.nbytes
    return {
        "exact keys": 0.5,
        "keys4": keys4,
        "minmax, mix 0.5": minmax,
        "minmax, mix 1 (Quest)": minmax,
    }


def _scores(loaded: LoadedModel, text: Sequence[int]) -> dict[str, torch.Tensor]:
    """Digest -> scores ``[layers, heads, blocks]`` for the mean over the text's last queries."""
    # A threshold that is never passed: the request stays dense and keeps its latest queries.
    config = OasisConfig(threshold_tokens=len(text) + 1)
    store = HostStore(loaded.geometry, loaded.geometry.blocks_for(len(text)))
    engine = Engine(loaded, config, store=store)
    request = engine.submit("digests", text, max_new_tokens=2)
    while request.computed < len(text):
        engine.step()
    queries = request.latest_queries()
    end = len(text) // loaded.geometry.block_tokens - config.window_blocks
    tiles = request.kv.tiles(config.sink_blocks, end).transpose(0, 1)
    engine.abort("digests")
    keys = tiles[..., : loaded.geometry.head_dim]
    scale = loaded.geometry.head_dim**-0.5
    minmax = build_minmax(tiles)
    logits = {
        "exact keys": key_logits(queries, keys, scale),
        "keys4": keys4_logits(queries, build_keys4(tiles), scale),
        "minmax, mix 0.5": minmax_logits(queries, minmax, 0.5, scale),
        "minmax, mix 1 (Quest)": minmax_logits(queries, minmax, 1.0, scale),
    }
    candidates = torch.ones(tiles.shape[:2], dtype=torch.bool, device=tiles.device)
    heads = loaded.geometry.num_kv_heads
    return {name: block_scores(each, candidates, heads) for name, each in logits.items()}
