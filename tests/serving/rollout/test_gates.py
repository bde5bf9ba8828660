"""Gates against known cases: public failures of other judges, and scipy's own figures."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from narrowgauge.serving.rollout.gates.base import Evidence, RequestRecord
from narrowgauge.serving.rollout.gates.errors import ErrorsGate, binomial_greater, fisher_greater
from narrowgauge.serving.rollout.gates.golden import (
    GoldenGate,
    GoldenPrompt,
    PromptScore,
    bootstrap,
    compare,
    kl_coarse,
    parse_scores,
    top_ids,
)
from narrowgauge.serving.rollout.gates.latency import LatencyGate, shift_of, tail_of
from narrowgauge.serving.rollout.gates.readiness import ReadinessGate

SEQ = itertools.count()


def records(times=(), *, faults=()):
    """One record for each time (successful) and one for each fault."""
    cases = [(time, None) for time in times] + [(0.1, fault) for fault in faults]
    return tuple(
        RequestRecord(
            seq=next(SEQ),
            t_end=0.0,
            model="m",
            revision="r",
            shadow=False,
            fault=fault,
            ttft_s=time,
            itl_p50_s=time,
            e2e_s=time,
            output_tokens=3,
        )
        for time, fault in cases
    )


def counted(errors, requests):
    return records([0.1] * (requests - errors), faults=["replica"] * errors)


@pytest.mark.parametrize(
    ("restarts", "ready", "result"),
    [(0, 1, "pass"), (1, 1, "pass"), (0, 0, "inconclusive"), (2, 1, "fail"), (2, 0, "fail")],
)
def test_readiness_forgives_one_restart_and_waits_for_ready(restarts, ready, result):
    evidence = Evidence(ready_replicas=ready, restarts=restarts)
    assert ReadinessGate(name="readiness", max_restarts=1).judge(evidence).result == result


@pytest.mark.parametrize(("restarts", "result"), [(1, "inconclusive"), (2, "fail")])
def test_readiness_says_how_the_last_replica_died(restarts, result):
    loss = "exit code 2: error: --threads must be at least 1; its log: /x/replica-1.log"
    verdict = ReadinessGate(name="readiness").judge(Evidence(restarts=restarts, last_loss=loss))
    assert verdict.result == result
    assert loss in verdict.reason


@pytest.mark.parametrize(
    ("canary", "stable", "p"),
    [
        ((3, 100), (0, 1900), 0.00012),
        ((1, 50), (0, 950), 0.05),
        ((5, 500), (10, 9500), 0.0006),
        ((0, 300), (3, 900), 1.0),
    ],
)
def test_fishers_p_is_the_known_one(canary, stable, p):
    assert fisher_greater(canary, stable) == pytest.approx(p, rel=0.05)


@pytest.mark.parametrize(
    ("canary", "stable", "result", "why"),
    [
        ((3, 100), (0, 1900), "fail", "3 of 100"),
        ((1, 50), (0, 950), "inconclusive", "one error is no verdict"),
        ((5, 500), (10, 9500), "pass", "1 % is what is allowed"),
        ((12, 500), (10, 9500), "fail", "2.4 % is more"),
        ((0, 300), (0, 300), "pass", "none"),
        ((0, 19), (0, 300), "inconclusive", "too few requests"),
        ((0, 0), (0, 0), "inconclusive", "no traffic is no verdict"),
        ((10, 12), (0, 300), "fail", "enough errors need no more requests"),
        ((50, 100), (50, 100), "inconclusive", "stable fails just as often"),
        ((3, 20), (0, 19), "fail", "15 % against a limit of 1 %"),
        ((3, 20), (0, 20), "fail", "one more healthy request of stable's changes nothing"),
        ((2, 150), (1, 100), "inconclusive", "two in 150 happen at 1 %"),
        ((2, 150), (0, 3000), "fail", "stable shows that it does not happen"),
        ((20, 20), (0, 0), "fail", "nothing to compare with: held against max_ratio"),
        ((11, 40), (0, 5), "fail", "too little to compare with"),
    ],
)
def test_errors_are_judged_by_counts(canary, stable, result, why):
    gate = ErrorsGate(name="errors", max_ratio=0.01, min_requests=20, min_errors=2)
    assert gate.judge(Evidence(canary=counted(*canary), stable=counted(*stable))).result == result, why


def test_a_clients_own_mistakes_are_not_counted():
    gate = ErrorsGate(name="errors", min_requests=5)
    canary = records([0.1] * 5, faults=["client"] * 40 + ["gateway"] * 10)
    verdict = gate.judge(Evidence(canary=canary, stable=counted(0, 20)))
    assert (verdict.result, verdict.figures["requests"]) == ("pass", 5)


def test_errors_after_promotion_count_too():
    gate = ErrorsGate(name="errors")
    evidence = Evidence(canary=counted(0, 50), stable=counted(0, 50), baking=counted(20, 50))
    assert gate.judge(evidence).result == "fail"


def test_the_binomial_fallback_is_scipys():
    expected = scipy.stats.binom.sf(10, 40, 0.01)  # P(X >= 11)
    assert binomial_greater((11, 40), 0.01) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("canary", "stable", "p"),
    [
        ([100] * 7 + [1] * 3, [1] * 10, 0.00081),  # spinnaker#6278, kayenta#780
        ([0, 1, 2, 1, 0, 0], [0] * 6, 0.037),  # kayenta#426: such counts belong to the errors gate
        ([1, 4, 2, 3, 1], [0] * 5, 0.0036),  # kayenta#799
        ([5] * 10, [5] * 10, 1.0),  # kayenta#301
        ([5] * 10, [6] * 10, 1.0),
        ([1], [1], 0.5),
        ([2], [1], 0.5),
    ],
)
def test_the_rank_tests_p_is_the_known_one(canary, stable, p):
    found = shift_of(tuple(map(float, canary)), tuple(map(float, stable)))["shift_p"]
    if canary == [1]:
        assert found in (pytest.approx(0.5, abs=0.01), 1.0)  # equal constants need no test
    else:
        assert found == pytest.approx(p, rel=0.06)


def test_the_shift_has_its_effect_sizes():
    figures = shift_of((100.0,) * 7 + (1.0,) * 3, (1.0,) * 10)
    assert figures["shift_cles"] == pytest.approx(0.85)
    assert figures["shift_s"] == pytest.approx(99.0)
    assert figures["shift_ratio"] == pytest.approx(100.0)


def test_the_shift_over_many_samples_needs_no_matrix_of_all_pairs():
    rng = np.random.default_rng(0)
    stable = tuple(rng.lognormal(0, 0.5, 12_500))
    canary = tuple(1.2 * rng.lognormal(0, 0.5, 2_500))
    figures = shift_of(canary, stable)
    assert figures["shift_ratio"] == pytest.approx(1.2, abs=0.06)
    assert figures["shift_p"] < 1e-6


LATENCY = LatencyGate(name="latency", metric="ttft_s", quantile=0.95, max_ratio=1.3, min_samples=10)


@pytest.mark.parametrize(
    ("canary", "stable", "result"),
    [
        ([100] * 7 + [1] * 3, [1] * 10, "fail"),
        ([5] * 10, [5] * 10, "pass"),
        ([5] * 10, [6] * 10, "pass"),
        ([1], [1], "inconclusive"),
        ([], [1] * 20, "inconclusive"),
        ([1] * 20, [], "inconclusive"),
        ([float("nan")] + [1] * 19, [1] * 20, "inconclusive"),
        ([1] * 20, [1] * 19 + [float("inf")], "inconclusive"),
        ([1.05 + 0.001 * i for i in range(60)], [1 + 0.001 * i for i in range(60)], "pass"),  # significant, yet small
    ],
)
def test_latency_is_judged_by_significance_and_size(canary, stable, result):
    assert LATENCY.judge(Evidence(canary=records(canary), stable=records(stable))).result == result


def test_a_tail_that_the_rank_test_cannot_see_fails_by_the_tail_rule():
    stable = [1.0 + 0.01 * (i % 50) for i in range(200)]
    canary = [0.9 + 0.01 * (i % 50) for i in range(80)] + [8.0] * 20  # a fifth is slow, the rest a little faster
    assert shift_of(tuple(canary), tuple(stable))["shift_p"] > 0.001
    verdict = LATENCY.judge(Evidence(canary=records(canary), stable=records(stable)))
    assert verdict.result == "fail"
    assert "20 of 100 above" in verdict.reason


def test_a_bimodal_canary_of_equal_rank_is_caught_by_its_tail():
    stable, canary = (50.0,) * 100, (1.0,) * 50 + (100.0,) * 50
    assert shift_of(canary, stable)["shift_p"] == pytest.approx(0.5, abs=0.02)
    assert tail_of(canary, stable, quantile=0.95, max_ratio=1.3)["tail_p"] < 1e-9


def test_failed_requests_and_those_without_a_time_are_no_samples():
    canary = (*records([1.0] * 9, faults=["replica"] * 9), *records([None] * 9))
    verdict = LATENCY.judge(Evidence(canary=canary, stable=records([1.0] * 20)))
    assert (verdict.result, verdict.figures["canary_samples"]) == ("inconclusive", 9)


def test_the_demos_latency_gate_spares_an_equal_canary_and_stops_a_really_slow_one():
    rng = np.random.default_rng(1)
    gate = LatencyGate(name="latency", metric="ttft_s", max_ratio=3.0, min_samples=20)
    results = [
        gate.judge(
            Evidence(canary=records(rng.lognormal(0, 0.8, 20)), stable=records(rng.lognormal(0, 0.8, 20)))
        ).result
        for _ in range(300)
    ]
    assert results.count("fail") == 0
    slow = [
        gate.judge(
            Evidence(canary=records(8 * rng.lognormal(0, 0.8, 20)), stable=records(rng.lognormal(0, 0.8, 20)))
        ).result
        for _ in range(100)
    ]
    assert slow.count("fail") >= 95


def golden(**changes):
    prompts = tuple(GoldenPrompt(prompt=f"p{i}") for i in range(8))
    return GoldenGate(name="golden", prompts=prompts, **{"top1_min": 0.6, **changes})


def scores(agree, tokens=20, kl=0.1, prompts=8):
    return tuple(PromptScore(tokens=tokens, agree=agree, kl_sum=kl * tokens) for _ in range(prompts))


@pytest.mark.parametrize(
    ("collected", "changes", "result"),
    [
        (scores(18), {}, "pass"),
        (scores(2), {}, "fail"),
        (scores(18), {"kl_max": 0.05}, "fail"),
        (scores(18), {"kl_max": 0.2}, "pass"),
        (scores(20, prompts=4) + scores(6, prompts=4), {}, "inconclusive"),
        (None, {}, "inconclusive"),
        (scores(0, tokens=0), {}, "inconclusive"),
        (scores(18, kl=math.nan), {}, "inconclusive"),
    ],
)
def test_golden_needs_the_whole_interval_on_one_side(collected, changes, result):
    assert golden(**changes).judge(Evidence(collected=collected)).result == result


def test_golden_says_why_there_are_no_scores():
    verdict = golden().judge(Evidence(collect_error="http://x: refused"))
    assert (verdict.result, verdict.reason) == ("inconclusive", "http://x: refused")


def test_the_bootstrap_is_scipys_and_repeats_itself():
    parts = [(float(v), 10) for v in (9, 7, 8, 10, 4, 6, 9, 8)]
    estimate, low, high = bootstrap(parts, confidence=0.95, seed=3)
    data = (np.array([v for v, _ in parts]) / 10,)
    theirs = scipy.stats.bootstrap(data, np.mean, method="percentile", n_resamples=5000, rng=np.random.default_rng(0))
    assert estimate == pytest.approx(np.mean(data))
    assert (low, high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.03)
    assert bootstrap(parts, confidence=0.95, seed=3) == (estimate, low, high)


def test_the_coarse_kl_is_a_lower_bound_of_the_full_one():
    rng = np.random.default_rng(2)
    for _ in range(50):
        p, q = rng.dirichlet(np.full(200, 0.1)), rng.dirichlet(np.full(200, 0.1))
        stable = {int(i): math.log(p[i]) for i in np.argsort(-p)[:20]}
        canary = {int(i): math.log(q[i]) for i in np.argsort(-q)[:20]}
        assert 0 <= kl_coarse(stable, canary) <= scipy.stats.entropy(p, q) + 1e-9
        assert kl_coarse(stable, stable) == pytest.approx(0.0, abs=1e-12)


def test_ties_go_to_the_lower_id_and_the_actual_token_is_no_candidate():
    assert compare([{5: -1.0, 3: -1.0}], [{3: -1.0, 9: -1.0}]).agree == 1
    listed = {token: -1.0 - token for token in range(20)} | {99: -50.0}
    assert set(top_ids(listed, actual=99)) == set(range(20))
    assert 99 in top_ids({1: -1.0, 99: -2.0}, actual=99)


def test_scores_are_read_from_an_answer_with_ids_and_from_no_other():
    logprobs = {
        "tokens": ["token_id:7", "token_id:8", "token_id:9"],
        "top_logprobs": [None, {"token_id:8": -0.1}, {"token_id:9": -0.2, "token_id:4": -2.0}],
    }
    assert parse_scores({"logprobs": logprobs}, prompt_tokens=2) == ({9: -0.2, 4: -2.0},)
    with pytest.raises(ValueError, match="names tokens by text"):
        parse_scores({"logprobs": logprobs | {"tokens": ["a", "b", " c"]}}, prompt_tokens=2)
    with pytest.raises(ValueError, match="3 scored tokens for 3 prompt tokens"):
        parse_scores({"logprobs": logprobs}, prompt_tokens=3)
    with pytest.raises(ValueError, match="0 scored tokens"):
        parse_scores({"logprobs": None}, prompt_tokens=2)


@pytest.mark.parametrize("kl_max", [None, 1.0])
def test_the_coarse_kl_is_told_only_where_it_counts(kl_max):
    """Two lists that share nothing have a small one: beside a failing top-1 it would look like praise."""
    gate = GoldenGate(
        name="golden", prompts=(GoldenPrompt(prompt="a"), GoldenPrompt(prompt="b")), top1_min=0.5, kl_max=kl_max
    )
    verdict = gate.judge(Evidence(collected=(PromptScore(tokens=10, agree=0, kl_sum=2.0),) * 2))
    assert verdict.result == "fail"
    assert "top-1 agreement 0 [0, 0], wanted at least 0.5" in verdict.reason
    assert ("KL over the ids in both top 20s 0.2" in verdict.reason) == (kl_max is not None)
    assert verdict.figures["kl_top20"] == pytest.approx(0.2)
