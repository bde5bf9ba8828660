"""Batches against a layout worked out by hand."""

import torch

from narrowgauge.engine.attention.base import make_attention
from narrowgauge.engine.batch import build_batch
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.scheduler import ScheduledChunk
from narrowgauge.engine.sequence import Sequence

CPU = torch.device("cpu")


def make_sequence(tokens: int, blocks: list[int], **params: object) -> Sequence:
    request = Request(request_id="r", prompt_ids=tuple(range(100, 100 + tokens)), params=SamplingParams(**params))  # type: ignore[arg-type]
    return Sequence(request=request, seed=0, max_tokens=4, stop_ids=frozenset(), arrival_s=0.0, blocks=blocks)


def test_single_tokens_come_first_and_a_half_computed_prompt_shows_only_its_context() -> None:
    half = make_sequence(20, [3, 4, 5, 6, 7])  # holds blocks for all of itself
    decode = make_sequence(9, [8, 1, 9])
    chunks = (ScheduledChunk(half, 2, 1, False), ScheduledChunk(half, 3, 3, False), ScheduledChunk(decode, 8, 1, True))
    backend = make_attention("reference", dtype=torch.float32, device=CPU)
    batch = build_batch(chunks, block_size=4, backend=backend, device=CPU)
    assert batch.ids_T.tolist() == [108, 102, 103, 104, 105]
    assert batch.positions_T.tolist() == [8, 2, 3, 4, 5]
    assert batch.attention.slots_T.tolist() == [9 * 4, 3 * 4 + 2, 3 * 4 + 3, 4 * 4, 4 * 4 + 1]
    query_lens, context_lens, tables = batch.attention.work
    assert (query_lens, context_lens) == ((1, 1, 3), (9, 3, 6))
    assert tables.tolist() == [[8, 1, 9], [3, 0, 0], [3, 4, 0]]
    assert batch.rows is not None
    assert batch.rows.tolist() == [0]
    assert batch.sampled == (2,)


def test_prompt_scores_take_the_row_before_each_token_and_skip_what_is_scored() -> None:
    sequence = make_sequence(6, [0, 1], prompt_logprobs=1)
    backend = make_attention("reference", dtype=torch.float32, device=CPU)
    first = build_batch((ScheduledChunk(sequence, 0, 4, False),), block_size=4, backend=backend, device=CPU)
    assert first.rows is None  # all four
    assert first.scored == ((0, 0, 4),)
    sequence.prompt_scores = [None] * 4  # type: ignore[list-item]
    last = build_batch((ScheduledChunk(sequence, 2, 4, True),), block_size=4, backend=backend, device=CPU)
    assert last.rows is not None
    assert last.rows.tolist() == [2, 3]  # position 4 scores token 5; position 5 is sampled from
    assert last.scored == ((0, 0, 1),)
    assert last.sampled == (0,)
