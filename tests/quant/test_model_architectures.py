"""Rows for odd families are checked against what transformers itself writes and runs."""

import pytest
from transformers import AutoConfig

from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.architectures import ARCHITECTURES, architecture, attention_implementation


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_names_in_a_row_are_those_that_transformers_writes(tiny_model, family):
    row, names = architecture(family), CheckpointReader(tiny_model(family)).names()
    assert row.renames
    for module, stored in row.renames:
        assert any(stored in name for name in names)
        assert not any(module in name for name in names)
    for expert in row.experts:
        assert any(f".experts.0.{expert}." in name for name in names)


def test_a_family_without_a_row_is_read_as_it_is():
    assert architecture("llama").renames == ()
    assert architecture("qwen3_moe").experts == ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", "sdpa"), ("gemma2", "eager"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager")]
)
def test_attention_is_sdpa_where_it_can_run_the_model(family, expected):
    assert attention_implementation(AutoConfig.for_model(family)) == expected
