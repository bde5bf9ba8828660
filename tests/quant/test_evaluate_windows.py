"""Windows: GPTQ's own recipe for WikiText-2, transformers' recipe for strides, and each policy for BOS."""

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from narrowgauge.quant.evaluate.evaluate import load_tokenizer
from narrowgauge.quant.evaluate.perplexity import perplexity, token_losses
from narrowgauge.quant.evaluate.windows import Cut, EvaluationError, default_cut, named_ids, wikitext2_ids
from narrowgauge.quant.texts import TextError

ROWS = ["", " = Title = \n", "", *(f" Sentence {i} of a text that goes on . \n" for i in range(40)), ""]


@pytest.fixture
def tokenizer(tiny_llama):
    return load_tokenizer(tiny_llama("for-its-tokenizer"))


@pytest.fixture
def begun(tokenizer):
    """A tokenizer that begins each text with BOS, as Llama's does."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def wikitext(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return path


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "novel.jsonl"
    path.write_text("".join(f'{{"text": "Chapter {i}: it was a dark and stormy night."}}\n' for i in range(100)))
    return path


def _gptq_windows(tokenizer, rows, length):
    """datautils.get_wikitext2 and the loop of llama_eval in IST-DASLab's gptq, written out."""
    testenc = tokenizer("\n\n".join(rows), return_tensors="pt").input_ids
    return torch.stack([testenc[0, i * length : (i + 1) * length] for i in range(testenc.numel() // length)])


@pytest.mark.parametrize("which", ["tokenizer", "begun"])
def test_wikitext2_is_cut_as_gptqs_script_cuts_it(request, wikitext, which):
    tokenizer = request.getfixturevalue(which)
    found = named_ids(f"wikitext2:{wikitext}", tokenizer, Cut(windows=None, length=64, bos="once"))
    assert torch.equal(found.ids, _gptq_windows(tokenizer, ROWS, 64))
    assert found.tokens == len(found.ids) * 63
    assert found.revisions[0].startswith("sha256:")
    assert (found.split, found.join, found.stride) == ("test", "\n\n", 64)
    assert found.bos == ("<s> once, before the text" if which == "begun" else "no token added")


def test_wikitext2_by_default_is_whole_with_windows_of_2048_and_one_bos():
    assert default_cut("wikitext2:some.parquet") == Cut(windows=None, length=2048, bos="once")
    assert default_cut("pydoc") == Cut(windows=8, length=512, bos="auto")


def test_without_the_hub_the_way_to_a_local_copy_is_told_in_one_line(tokenizer, monkeypatch):
    import datasets
    import huggingface_hub

    def offline(*arguments, **named):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(
        TextError, match=r"no route to the hub\); .*hf download Salesforce/wikitext .*--text wikitext2:"
    ) as told:
        wikitext2_ids(tokenizer, Cut(windows=None, length=64))
    assert "\n" not in str(told.value)


def test_from_the_hub_the_very_commit_that_is_reported_is_read(tokenizer, monkeypatch):
    import datasets
    import huggingface_hub

    asked = {}

    def load(*arguments, **named):
        asked.update(named, names=arguments)
        return [{"text": row} for row in ROWS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **k: type("Info", (), {"sha": "c" * 40})())
    found = wikitext2_ids(tokenizer, Cut(windows=2, length=64, bos="once"))
    assert asked["names"] == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert (asked["split"], asked["revision"]) == ("test", "c" * 40)
    assert found.revisions == ("c" * 40,)
    assert torch.equal(found.ids, _gptq_windows(tokenizer, ROWS, 64)[:2])


@pytest.mark.parametrize(("length", "stride"), [(32, 8), (32, 20), (40, 40), (33, 1)])
def test_overlapping_windows_score_each_token_once_as_transformers_guide_does(novel, tokenizer, length, stride):
    found = named_ids(str(novel), tokenizer, Cut(windows=6, length=length, stride=stride))
    tokens = [*found.ids[0].tolist()]
    for row in found.ids[1:].tolist():
        tokens += row[-stride:]
    table = torch.randn(258, 258, generator=torch.Generator().manual_seed(1))
    losses, previous_end = [], 0
    for begin in range(
        0, len(tokens) - length + 1, stride
    ):  # "Perplexity of fixed-length models" in transformers' docs
        end = begin + length
        ids = torch.tensor([tokens[begin:end]])
        targets = ids.clone()
        targets[:, : -(end - previous_end)] = -100
        loss = torch.nn.functional.cross_entropy(
            table[ids[0, :-1]], targets[0, 1:], reduction="none", ignore_index=-100
        )
        losses.append(loss[targets[0, 1:] != -100])
        previous_end = end
    expected = torch.cat(losses)
    measured = token_losses(table[found.ids], found.ids, found.first)
    torch.testing.assert_close(measured, expected)
    assert found.tokens == len(expected) == length - 1 + 5 * min(stride, length - 1)
    assert perplexity(measured) == pytest.approx(expected.double().mean().exp().item())


def test_policies_for_bos_begin_the_windows_that_they_say(novel, tokenizer):
    plain = named_ids(str(novel), tokenizer, Cut(windows=3, length=20))
    each = named_ids(str(novel), tokenizer, Cut(windows=3, length=21, bos="each"))
    assert each.ids[:, 0].tolist() == [0, 0, 0], "a tokenizer that adds no BOS by itself still has one"
    assert torch.equal(each.ids[:, 1:], plain.ids)
    assert (each.bos, each.stride) == ("<s> in each window", 20)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    auto = named_ids(str(novel), tokenizer, Cut(windows=3, length=21))
    assert torch.equal(auto.ids, each.ids), "an EOS at a text's end begins no window"
    once = named_ids(str(novel), tokenizer, Cut(windows=3, length=20, bos="once"))
    assert once.ids.flatten().tolist() == [0, *plain.ids.flatten().tolist()[:59]]
    none = named_ids(str(novel), tokenizer, Cut(windows=3, length=20, bos="none"))
    assert torch.equal(none.ids, plain.ids)


def test_a_tokenizer_without_bos_cannot_begin_each_window_with_one(novel, tokenizer):
    tokenizer.bos_token = None
    with pytest.raises(EvaluationError, match="the tokenizer has none; use auto or none"):
        named_ids(str(novel), tokenizer, Cut(bos="each"))


def test_what_the_windows_begin_with_is_never_scored(novel, tokenizer):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    found = named_ids(str(novel), tokenizer, Cut(windows=2, length=20, stride=9))
    assert found.first.tolist() == [2, 11]
    assert found.tokens == 18 + 9


@pytest.mark.parametrize("stride", [0, 65])
def test_a_stride_that_skips_text_is_refused(stride):
    with pytest.raises(EvaluationError, match="stride: must be 1 to the window's 64 tokens"):
        Cut(length=64, stride=stride)


def test_a_file_without_a_column_of_text_is_named(tmp_path, tokenizer):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"words": "a"}\n')
    with pytest.raises(TextError, match=r"odd\.jsonl: cannot be read as rows with a column text"):
        wikitext2_ids(tokenizer, Cut(), path=path)
