"""Sampling against scipy's chi-square test and transformers' own logits processors."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from narrowgauge.engine.logits import apply_count_penalties, apply_repetition_penalty
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.sampler import BROKEN_MODEL, Sampled, Unusable, probabilities, sample, score, uniform
from narrowgauge.engine.sequence import Sequence

VOCABULARY = 50


def make_sequence(
    *,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    seed: int = 0,
    stop: tuple[int, ...] = (),
    **params: object,
) -> Sequence:
    request = Request(request_id="r", prompt_ids=prompt, params=SamplingParams(**params))  # type: ignore[arg-type]
    sequence = Sequence(request=request, seed=seed, max_tokens=9999, stop_ids=frozenset(stop), arrival_s=0.0)
    sequence.tokens += output
    return sequence


def make_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 8},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    ],
)
def test_draws_follow_the_distribution_that_transformers_filters_to(params: dict[str, float]) -> None:
    logits = make_logits()
    warped = TemperatureLogitsWarper(params["temperature"])(None, logits.clone())
    if "min_p" in params:
        warped = MinPLogitsWarper(params["min_p"])(None, warped)
    if "top_k" in params:
        warped = TopKLogitsWarper(int(params["top_k"]))(None, warped)
    if "top_p" in params:
        warped = TopPLogitsWarper(params["top_p"])(None, warped)
    expected = warped.double().softmax(-1)[0].numpy()
    mine = probabilities(logits[0].numpy(), SamplingParams(**params))  # type: ignore[arg-type]
    np.testing.assert_allclose(mine / mine.sum(), expected, atol=1e-6)

    draws = 6000
    sequence = make_sequence(seed=11, **params)
    counts = np.zeros(VOCABULARY)
    for _ in range(draws):
        counts[sample(logits, [sequence])[0].token_id] += 1
        sequence.tokens.append(0)  # the next position of the same stream
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    kept = wanted > 0
    assert stats.chisquare(observed[kept], wanted[kept]).pvalue > 1e-3


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, [7, 31]] = 5.0
    plain, watched = make_sequence(temperature=0.0), make_sequence(temperature=0.0, logprobs=3)
    chosen = sample(logits, [plain, watched])
    assert [c.token_id for c in chosen] == [7, 7]
    assert chosen[1].logprobs is not None
    assert [t.token_id for t in chosen[1].logprobs.top] == [7, 31, 0]


def test_top_k_keeps_exactly_k_of_equal_logits_lowest_ids_first() -> None:
    kept = probabilities(np.zeros(VOCABULARY, np.float32), SamplingParams(top_k=3))
    assert np.flatnonzero(kept).tolist() == [0, 1, 2]


def test_repetition_penalty_is_transformers() -> None:
    logits = make_logits(3)
    tokens = (4, 9, 9, 17)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits.clone())
    sequence = make_sequence(prompt=tokens[:2], output=tokens[2:], temperature=0.0, repetition_penalty=1.3)
    assert sample(logits, [sequence])[0].token_id == int(expected.argmax())
    row = logits[0].numpy().copy()
    apply_repetition_penalty(row, tokens, 1.3)
    np.testing.assert_allclose(row, expected[0].numpy(), atol=1e-6)


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    row = np.zeros(6, np.float32)
    apply_count_penalties(row, [2, 2, 2, 5], presence=0.5, frequency=0.25)
    np.testing.assert_allclose(row, [0, 0, -1.25, 0, 0, -0.75])
    logits = torch.zeros(1, 6)
    logits[0, 3], logits[0, 4] = 1.0, 0.9
    in_prompt = make_sequence(prompt=(3,), temperature=0.0, presence_penalty=1.0)
    generated = make_sequence(prompt=(1,), output=(3,), temperature=0.0, presence_penalty=1.0)
    assert [sample(logits, [s])[0].token_id for s in (in_prompt, generated)] == [3, 4]


def test_bias_and_masked_stop_tokens_change_the_choice_but_not_the_logprobs() -> None:
    logits = make_logits(5)
    best = int(logits.argmax())
    banned = make_sequence(temperature=0.0, logit_bias={best: -100.0}, logprobs=0)
    too_early = make_sequence(temperature=0.0, min_tokens=1, stop=(best,))
    answers = sample(logits.repeat(2, 1), [banned, too_early])
    second = int(logits[0].topk(2).indices[1])
    assert [a.token_id for a in answers] == [second, second]
    assert answers[0].logprobs is not None
    assert answers[0].logprobs.chosen.logprob == pytest.approx(float(logits[0].log_softmax(-1)[second]), abs=1e-5)
    assert answers[0].logprobs.top == ()


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = make_logits(8)
    sequence = make_sequence(temperature=0.3, top_k=1, logprobs=5, repetition_penalty=2.0)
    answer = sample(logits, [sequence])[0].logprobs
    raw = logits[0].double().log_softmax(-1)
    assert answer is not None
    best = raw.topk(5)
    assert [t.token_id for t in answer.top] == best.indices.tolist()
    assert [t.logprob for t in answer.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_scores_are_the_log_softmax_at_the_given_tokens() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1)).bfloat16()
    raw = logits.double().log_softmax(-1)
    for row, entry in enumerate(score(logits, [3, 1, 4, 1], 20)):
        assert entry.chosen.logprob == pytest.approx(float(raw[row, entry.chosen.token_id]), abs=1e-6)
        assert len(entry.top) == 20
        assert entry.top[0].logprob == pytest.approx(float(raw[row].max()), abs=1e-6)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    assert uniform(7, 100) == uniform(7, 100)
    assert len({uniform(seed, position) for seed in (-1, 0, 1, 2**63) for position in range(50)}) == 200
    numbers = [uniform(3, position) for position in range(4000)]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 20] = 0.0
    sequence = make_sequence()
    for _ in range(200):
        assert sample(logits, [sequence])[0].token_id == 20
        sequence.tokens.append(20)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"temperature": 1.0, "logit_bias": {3: 50.0}, "min_tokens": 1},
    ],
)
def test_a_row_without_a_finite_best_logit_gives_no_token_and_leaves_its_mates_alone(
    value: float, params: dict[str, object]
) -> None:
    healthy = make_logits()
    broken = torch.full((1, VOCABULARY), -torch.inf) if value == -np.inf else make_logits(1)
    broken[0, 7] = value
    sequences = [make_sequence(seed=3, **params) for _ in range(3)]
    first, second, third = sample(torch.cat([healthy, broken, healthy]), sequences)
    assert second == BROKEN_MODEL
    assert first == third == sample(healthy, sequences[:1])[0]


def test_a_request_that_leaves_no_token_is_told_so_and_the_model_is_not_blamed() -> None:
    outcome = sample(make_logits(), [make_sequence(min_tokens=1, stop=tuple(range(VOCABULARY)))])[0]
    assert isinstance(outcome, Unusable)
    assert "this request's logit_bias, min_tokens and stop_token_ids" in outcome.reason


@pytest.mark.parametrize("bias", [1e39, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_beyond_float32_wins_like_any_large_one(bias: float, temperature: float) -> None:
    sequence = make_sequence(logit_bias={31: bias, 5: -bias}, temperature=temperature)
    assert sample(make_logits(), [sequence]) == [Sampled(31)]
