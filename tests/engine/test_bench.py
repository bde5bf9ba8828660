"""The benchmark's rows, on a tiny model; speed itself is not a test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.engine.bench import BenchError, BenchSpec, bench_engine


def test_rows_hold_both_sides_and_their_ratio(make_llama: Callable[..., Path]) -> None:
    said: list[str] = []
    spec = BenchSpec(threads=1, tokens=6, rounds=2)
    rows = bench_engine(make_llama(), None, spec, progress=said.append)
    assert [row["name"].partition("/")[2] for row in rows] == ["b1", "b8"]
    for row in rows:
        assert row["unit"] == "tok/s"
        assert row["peer_name"] == "transformers"
        assert row["ours_min"] <= row["ours"] <= row["ours_max"]
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"], rel=0.01)
    assert len(said) == 3 * 2 * 2


def test_without_a_peer_there_is_no_ratio(make_llama: Callable[..., Path]) -> None:
    rows = bench_engine(make_llama(), None, BenchSpec(threads=1, tokens=4, rounds=1, against=None))
    assert [(row["peer"], row["ratio"]) for row in rows] == [(None, None)] * 2


def test_an_unknown_peer_is_refused(make_llama: Callable[..., Path]) -> None:
    with pytest.raises(BenchError, match="known: transformers"):
        bench_engine(make_llama(), None, BenchSpec(against="elsewhere"))
