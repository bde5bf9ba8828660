"""What EngineConfig refuses."""

from pathlib import Path

import pytest

from narrowgauge.engine.config import EngineConfig, EngineConfigError


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_size": 0}, "--block-size must be at least 1"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"threads": 0}, "--threads"),
        ({"dtype": "float16"}, "--dtype must be one of auto, float32, bfloat16"),
        ({"linear": "magic"}, "--linear"),
        ({"num_kv_blocks": 5, "kv_cache_bytes": 5}, "give one of them"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_flag(settings: dict[str, object], match: str) -> None:
    with pytest.raises(EngineConfigError, match=match):
        EngineConfig(model=Path("x"), **settings)  # type: ignore[arg-type]


def test_a_folder_given_as_text_becomes_a_path() -> None:
    assert EngineConfig(model="x").model == Path("x")  # type: ignore[arg-type]
