"""The ring of records and the stopwatch."""

import itertools
import statistics

import pytest

from narrowgauge.serving.gateway.records import RecordRing, Stopwatch

FIELDS = {
    **{"model": "m", "revision": "r", "role": "stable", "shadow": False, "status": 200, "fault": None},
    **{"finish_reason": "stop", "ttft_s": 0.1, "itl_p50_s": 0.01, "e2e_s": 0.5},
    **{"prompt_tokens": 3, "output_tokens": 9},
}


def test_a_record_has_the_keys_of_the_contract():
    record = RecordRing(4, clock=lambda: 12.5).add(**FIELDS)
    assert list(record.to_json()) == [
        *("seq", "t_end", "model", "revision", "role", "shadow", "status", "fault", "finish_reason"),
        *("ttft_s", "itl_p50_s", "e2e_s", "prompt_tokens", "output_tokens"),
    ]
    assert record.to_json() == {"seq": 12_500_000, "t_end": 12.5, **FIELDS}


def test_a_reader_sees_each_record_once_and_in_order():
    ring = RecordRing(100)
    seen, after = [], 0
    for size in (3, 0, 5, 1):
        for _ in range(size):
            ring.add(**FIELDS)
        while True:
            found, after = ring.after(after, limit=2)
            seen += [record.seq for record in found]
            if not found:
                break
    assert seen == list(range(seen[0], seen[0] + 9))


def test_a_full_ring_drops_the_oldest():
    ring = RecordRing(4)
    numbers = [ring.add(**FIELDS).seq for _ in range(10)]
    found, following = ring.after(numbers[0], limit=100)
    assert [record.seq for record in found] == numbers[6:]
    assert following == numbers[-1]
    assert ring.after(following, limit=100) == ([], following)


def test_numbers_of_a_later_gateway_are_above_those_of_an_earlier_one():
    earlier = RecordRing(1_000, clock=lambda: 1_000.0)
    last = [earlier.add(**FIELDS) for _ in range(500)][-1]
    later = RecordRing(1_000, clock=lambda: 1_000.001)
    record = later.add(**FIELDS)
    assert record.seq > last.seq
    assert later.after(last.seq, limit=10) == ([record], record.seq)


def test_a_number_from_the_future_reads_from_the_oldest():
    ring = RecordRing(10, clock=lambda: 5.0)
    record = ring.add(**FIELDS)
    assert ring.after(record.seq + 1_000, limit=10) == ([record], record.seq)


@pytest.mark.parametrize("moments", [[], [1.5], [1.5, 1.6], [1.5, 1.6, 1.9, 2.0, 2.4]])
def test_the_stopwatch_gives_first_event_and_median_gap(moments):
    watch = Stopwatch(1.0)
    for moment in moments:
        watch.event(moment)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert watch.ttft_s == (moments[0] - 1.0 if moments else None)
    assert watch.itl_p50_s == (statistics.median(gaps) if gaps else None)
