"""Perplexity over windows, and the protocol of whatever gives logits.

Legend: S windows, L tokens a window, V vocabulary, N scored tokens. In window s the tokens first[s] .. L-1 are scored, each
from those before it in the same window (first None: all but the first). Losses are in nats, from a float32 log-softmax over
the whole vocabulary. Windows hold real tokens only: there is no padding, so a batch has nothing to mask and its size changes
no figure.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

CHUNK_BYTES = 2 << 20
"""Logits handled at once: a chunk and its temporaries stay in a core's cache (8 rows of 49k beat 128 rows threefold)."""
DEVICE_CHUNK_BYTES = 256 << 20
"""The same on an accelerator, where a chunk of a few rows would cost more to launch than to compute."""


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


def row_chunks(logits: torch.Tensor, ids: torch.Tensor, first: torch.Tensor | None = None) -> Iterator[Chunk]:
    """Walks over the scored rows of logits [S, L, V] for ids [S, L], a chunk at a time, copying nothing.

    Chunks fit a core's cache, or keep an accelerator busy. `targets` are on the device of the logits.
    """
    windows, length, vocabulary = logits.shape
    chunk_bytes = CHUNK_BYTES if logits.device.type == "cpu" else DEVICE_CHUNK_BYTES
    step = max(1, chunk_bytes // (4 * vocabulary))
    done = 0
    for window, begin in enumerate([1] * windows if first is None else first.tolist()):
        targets = ids[window, begin:, None].to(logits.device)
        for start in range(0, length - begin, step):
            stop = min(start + step, length - begin)
            rows = slice(begin - 1 + start, begin - 1 + stop)
            yield Chunk(window, rows, slice(done + start, done + stop), targets[start:stop])
        done += length - begin


def count_scored(ids: torch.Tensor, first: torch.Tensor | None = None) -> int:
    """N, the number of scored tokens of ids [S, L]."""
    windows, length = ids.shape
    return windows * (length - 1) if first is None else int((length - first).sum())


def token_losses(logits: torch.Tensor, ids: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
    """float32 logits [S, L, V], ids [S, L] -> negative log-likelihood of each scored token, [N] float32, nats."""
    assert logits.shape[:2] == ids.shape
    losses = torch.empty(count_scored(ids, first))
    for chunk in row_chunks(logits, ids, first):
        log_p = torch.log_softmax(logits[chunk.window, chunk.rows], dim=-1)
        losses[chunk.out] = -log_p.gather(1, chunk.targets).squeeze(1).cpu()
    return losses


def perplexity(losses: torch.Tensor) -> float:
    """exp(mean loss), the mean taken in float64; inf where it does not fit a float, NaN where a loss is NaN."""
    mean = losses.double().mean().item()
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
