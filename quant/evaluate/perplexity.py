"""Perplexity over disjoint windows, and the protocol of whatever gives logits.

Legend: S windows, L tokens a window, V vocabulary. In each window the tokens 1 .. L-1 are scored, each from those before
it in the same window: S·(L-1) positions. Losses are in nats, from a float32 log-softmax over the whole vocabulary.
Windows hold real tokens only: there is no padding, so a batch has nothing to mask and its size changes no figure.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

CHUNK_BYTES = 2 << 20
"""Logits handled at once: a chunk and its temporaries stay in a core's cache (8 rows of 49k beat 128 rows threefold)."""


class LogitsSource(Protocol):
    """Anything that turns token ids into logits: the reference modules, our engine, a fake in a test."""

    name: str
    """What computed the logits: "reference" or "engine"."""
    dtype: str
    """The dtype of activations ("float32", "bfloat16")."""
    attention: str
    """The attention implementation, as its library calls it."""

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [S, L] int64 -> logits [S, L, V] float32, each window on its own, from its first token on."""


@dataclass(frozen=True)
class Chunk:
    """Some scored rows of one window: logits[window, rows] predict `targets` [R, 1] and fill `out` of a result [N]."""

    window: int
    rows: slice
    out: slice
    targets: torch.Tensor


def row_chunks(logits: torch.Tensor, ids: torch.Tensor) -> Iterator[Chunk]:
    """Walks over the scored rows of logits [S, L, V] for ids [S, L], a cache-sized chunk at a time, copying nothing."""
    windows, length, vocabulary = logits.shape
    scored = length - 1
    step = max(1, CHUNK_BYTES // (4 * vocabulary))
    for window in range(windows):
        for start in range(0, scored, step):
            stop = min(start + step, scored)
            out = slice(window * scored + start, window * scored + stop)
            yield Chunk(window, slice(start, stop), out, ids[window, start + 1 : stop + 1, None])


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 logits [S, L, V], ids [S, L] -> negative log-likelihood of each scored token, [S·(L-1)] float32, nats."""
    assert logits.shape[:2] == ids.shape
    losses = torch.empty(ids.shape[0] * (ids.shape[1] - 1))
    for chunk in row_chunks(logits, ids):
        log_p = torch.log_softmax(logits[chunk.window, chunk.rows], dim=-1)
        losses[chunk.out] = -log_p.gather(1, chunk.targets).squeeze(1)
    return losses


def perplexity(losses: torch.Tensor) -> float:
    """exp(mean loss), the mean taken in float64; inf where it does not fit a float, NaN where a loss is NaN."""
    mean = losses.double().mean().item()
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
