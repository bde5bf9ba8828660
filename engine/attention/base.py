"""What an attention backend is: it lays a step out once, and then attends in every layer.

T tokens, S sequences, H query heads, G kv heads, D head size, N blocks, B block size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowgauge.quant.formats.read import lookup

ATTENTION_BACKENDS: Mapping[str, str] = {
    "sdpa": "narrowgauge.engine.attention.sdpa:SdpaAttention",
    "reference": "narrowgauge.engine.attention.reference:ReferenceAttention",
}


class AttentionError(ValueError):
    """An attention backend that is unknown."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The sequences of a step, in the order of their tokens: query_lens[s] tokens each, the last of context_lens[s] ones.

    The context counts the query tokens; `tables[s]` are exactly the blocks that it reaches into. Sequences with one query
    token stand first, by falling context, so that a backend finds neighbours of like length.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    tables: tuple[list[int], ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What every layer of one step needs: where the new keys and values go, and the backend's own layout of the work.

    slots_T int64: block * B + offset of each token. `work` is what `AttentionBackend.plan` made of the layout.
    """

    slots_T: torch.Tensor
    work: Any


class AttentionBackend(Protocol):
    """Computes causal attention over the paged cache. Holds no state between steps.

    A third backend needs: `plan`, called once a step with Python lists (build index tensors here, not in `attend`), and
    `attend`, called once a layer after the step's keys and values were written to the cache. It must serve single-token and
    longer queries in one batch, any block table, H a multiple of G, and must not read slots beyond a context's length
    into a result (they hold finite leftovers of other sequences).
    """

    name: str

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None: ...

    def plan(self, layout: BatchLayout) -> Any:
        """This backend's `work` for one step."""

    def attend(self, q_THD: torch.Tensor, cache_NB2GD: torch.Tensor, work: Any, *, scale: float) -> torch.Tensor:
        """softmax(q k^T * scale) v: [T, H, D]."""


def make_attention(name: str, *, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend of that name ("auto" is sdpa). Raises AttentionError with the known names."""
    chosen = "sdpa" if name == "auto" else name
    if chosen not in ATTENTION_BACKENDS:
        raise AttentionError(
            f"--attention-backend {name}: unknown; known: auto, {', '.join(sorted(ATTENTION_BACKENDS))}"
        )
    backend: AttentionBackend = lookup(ATTENTION_BACKENDS, chosen)(dtype=dtype, device=device)
    return backend
