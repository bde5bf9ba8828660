"""The whole evaluation: streamed windows give transformers' own perplexity; held-out windows are what they claim."""

import dataclasses
import importlib.metadata
import math

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.quant.calibration import build_calibration
from narrowgauge.quant.evaluate.evaluate import EvaluationError, evaluate, load_tokenizer
from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.evaluate.report import EvalReport, Subject
from narrowgauge.quant.evaluate.subject import describe
from narrowgauge.quant.evaluate.windows import Cut, HeldOut, heldout_ids
from narrowgauge.quant.recipe import CalibrationSpec, TextSource
from narrowgauge.quant.sources import resolve
from narrowgauge.quant.texts import TextError, documents

SUBJECT, BASE = Subject(name="candidate"), Subject(name="base")


@dataclasses.dataclass
class Table:
    """A LogitsSource that looks its logits up by the token, so that no batch can change them."""

    logits_VV: torch.Tensor
    name: str = "reference"
    dtype: str = "float32"
    attention: str = "none"
    calls: list[int] = dataclasses.field(default_factory=list)

    def logits(self, ids):
        self.calls.append(len(ids))
        return self.logits_VV[ids]


def _table(seed, size=50):
    return Table(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))


def _heldout(windows=5, length=30, size=50):
    ids = torch.randint(size, (windows, length), generator=torch.Generator().manual_seed(9))
    return HeldOut(ids=ids, sources=("text",), split="heldout", join="\n\n", bos="no token added")


def _spec(*paths):
    return CalibrationSpec(sources=tuple(TextSource(text=str(path)) for path in paths))


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "novel.jsonl"
    path.write_text("".join(f'{{"text": "Chapter {i}: it was a dark and stormy night."}}\n' for i in range(100)))
    return path


@pytest.fixture
def tokenizer(tiny_llama):
    return load_tokenizer(tiny_llama("for-its-tokenizer"))


@pytest.mark.parametrize("batch", [2, 3, 5, 64])
def test_the_batch_changes_no_figure(batch):
    one = evaluate(_table(1), _table(2), _heldout(), candidate_subject=SUBJECT, base_subject=BASE)
    many = evaluate(_table(1), _table(2), _heldout(), candidate_subject=SUBJECT, base_subject=BASE, batch=batch)
    assert many.figures() == one.figures()
    assert (one.conventions.batch, many.conventions.batch) == (1, batch)


def test_windows_stream_through_both_models_a_batch_at_a_time():
    candidate, base, seen = _table(1), _table(2), []
    evaluate(
        candidate,
        base,
        _heldout(windows=5),
        candidate_subject=SUBJECT,
        base_subject=BASE,
        batch=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert candidate.calls == base.calls == [2, 2, 1]
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_a_model_against_itself_has_no_divergence_and_full_agreement():
    report = evaluate(_table(1), _table(1), _heldout(), candidate_subject=SUBJECT, base_subject=BASE)
    assert (report.kl_mean, report.kl_max, report.delta_p_rms) == (0, 0, 0)
    assert (report.top1, report.perplexity_ratio) == (1, 1)


def test_the_base_changes_no_figure_of_the_candidate():
    alone = evaluate(_table(1), None, _heldout(), candidate_subject=SUBJECT)
    beside = evaluate(_table(1), _table(2), _heldout(), candidate_subject=SUBJECT, base_subject=BASE)
    assert alone.perplexity == beside.perplexity
    assert alone.figures().keys() == {"perplexity"}


def test_the_report_records_the_conventions():
    report = evaluate(_table(1), None, _heldout(windows=5, length=30), candidate_subject=SUBJECT, notes=("a remark",))
    how = report.conventions
    assert (how.windows, how.window, how.stride, how.tokens) == (5, 30, 30, 145)
    assert (how.dataset, how.split, how.join, how.bos) == (("text",), "heldout", "\n\n", "no token added")
    assert (how.dtype, how.attention, how.softmax_dtype) == ("float32", "none", "float32")
    assert how.versions["torch"] == importlib.metadata.version("torch")
    assert report.notes == ("a remark",)
    assert EvalReport.from_json(report.to_json()) == report


def test_figures_that_are_not_finite_are_named_and_not_given():
    broken = _table(1)
    broken.logits_VV[7, 3] = math.nan
    report = evaluate(broken, _table(2), _heldout(), candidate_subject=SUBJECT, base_subject=BASE)
    assert {"perplexity", "perplexity_ratio", "kl_mean", "kl_max"} <= set(report.non_finite)
    assert report.perplexity is None
    assert report.base_perplexity is not None


def test_models_of_different_vocabularies_are_not_compared():
    with pytest.raises(EvaluationError, match="the candidate has 60 tokens, the base 50"):
        evaluate(_table(1, 60), _table(2, 50), _heldout(), candidate_subject=SUBJECT, base_subject=BASE)


def test_perplexity_is_exp_of_transformers_own_loss_whatever_the_batch(tiny_llama):
    folder = tiny_llama()
    heldout = _heldout(windows=4, length=40, size=258)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = math.exp(model(heldout.ids, labels=heldout.ids).loss.item())
    for batch in (1, 3):
        source = ReferenceModel(folder, dtype=torch.float32)
        report = evaluate(source, source, heldout, candidate_subject=SUBJECT, base_subject=BASE, batch=batch)
        assert report.perplexity == pytest.approx(expected, rel=1e-5)
        assert report.kl_mean == 0


def test_perplexity_of_the_real_model_is_exp_of_transformers_own_loss(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    heldout = heldout_ids(CalibrationSpec(), tokenizer, Cut(windows=2, length=256))
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        expected = math.exp(model(heldout.ids, labels=heldout.ids).loss.item())
    report = evaluate(ReferenceModel(smollm2, dtype=torch.float32), None, heldout, candidate_subject=SUBJECT)
    assert report.perplexity == pytest.approx(expected, rel=1e-5)
    assert report.perplexity < 30, "the real model has learnt English"


def test_the_real_model_in_bfloat16_is_close_to_itself_in_float32(smollm2):
    heldout = heldout_ids(CalibrationSpec(), AutoTokenizer.from_pretrained(smollm2), Cut(windows=1, length=256))
    report = evaluate(
        ReferenceModel(smollm2, dtype=torch.bfloat16),
        ReferenceModel(smollm2, dtype=torch.float32),
        heldout,
        candidate_subject=SUBJECT,
        base_subject=BASE,
    )
    assert 0 < report.kl_mean < 0.003
    assert report.top1 > 0.95
    assert (report.conventions.dtype, report.conventions.base_dtype) == ("bfloat16", "float32")


def test_windows_are_the_disjoint_beginning_of_the_joined_text(novel, tokenizer):
    heldout = heldout_ids(_spec(novel), tokenizer, Cut(windows=4, length=64))
    joined = "\n\n".join(documents(str(novel), split="heldout"))
    assert heldout.ids.flatten().tolist() == tokenizer(joined, add_special_tokens=False).input_ids[: 4 * 64]
    assert heldout.bos == "no token added"


def test_held_out_text_is_never_calibrated_on(novel, tokenizer):
    heldout = heldout_ids(_spec(novel), tokenizer, Cut(windows=4, length=64))
    spec = dataclasses.replace(_spec(novel), samples=40, length=64)
    calibrated = tokenizer.decode(build_calibration(spec, tokenizer).ids.flatten().tolist())
    chapters = [line for line in tokenizer.decode(heldout.ids.flatten().tolist()).split("\n\n")[:-1] if line]
    assert chapters
    assert not any(chapter in calibrated for chapter in chapters)


def test_the_length_of_the_text_behind_the_windows_does_not_matter(novel, tokenizer):
    few = heldout_ids(_spec(novel), tokenizer, Cut(windows=2, length=32))
    many = heldout_ids(_spec(novel), tokenizer, Cut(windows=10, length=32))
    assert torch.equal(few.ids, many.ids[:2])


def test_every_window_begins_as_the_tokenizer_begins_a_text(novel, tokenizer):
    plain = heldout_ids(_spec(novel), tokenizer, Cut(windows=3, length=20))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begun = heldout_ids(_spec(novel), tokenizer, Cut(windows=3, length=21))
    assert begun.ids[:, 0].tolist() == [0, 0, 0]
    assert torch.equal(begun.ids[:, 1:], plain.ids)
    assert begun.bos == "<s> in each window"


def test_sources_share_the_windows_by_their_weights(novel, tmp_path, tokenizer):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "0123456789 0123456789"}\n' * 100)
    spec = CalibrationSpec(sources=(TextSource(text=str(novel), weight=3.0), TextSource(text=str(other), weight=1.0)))
    heldout = heldout_ids(spec, tokenizer, Cut(windows=4, length=32))
    digits = [tokenizer.decode(row).count("3") > 1 for row in heldout.ids.tolist()]
    assert digits == [False, False, False, True]
    assert heldout.sources == (str(novel), str(other))


def test_too_little_text_is_refused_with_its_number_of_tokens(novel, tokenizer):
    total = len(tokenizer("\n\n".join(documents(str(novel), split="heldout"))).input_ids)
    with pytest.raises(TextError, match=f"holds {total} held-out tokens; 100 windows of 64 need 6400"):
        heldout_ids(_spec(novel), tokenizer, Cut(windows=100, length=64))


@pytest.mark.parametrize(("windows", "length"), [(0, 8), (1, 1), (-1, 8)])
def test_windows_that_score_nothing_are_refused(novel, tokenizer, windows, length):
    with pytest.raises(EvaluationError, match="at least 1 window of 2 tokens"):
        heldout_ids(_spec(novel), tokenizer, Cut(windows=windows, length=length))


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tiny_llama):
    folder = tiny_llama()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(EvaluationError, match="no usable tokenizer") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_model_is_described_by_its_uri_digest_and_bytes(tiny_llama, tmp_path):
    folder = tiny_llama()
    model = resolve(str(folder), cache=tmp_path)
    subject = describe(model)
    assert (subject.name, subject.digest, subject.scheme) == (str(folder), model.digest, None)
    assert subject.size_bytes == (folder / "model.safetensors").stat().st_size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_accelerator_gives_the_figures_of_the_processor(tiny_llama, quantized, dtype):
    base = tiny_llama()
    folder = quantized(
        base, "{weights: {bits: 8}, activations: {bits: 8, type: int}, kv_cache: {bits: 8, type: float}}"
    )
    heldout = _heldout(windows=3, length=64, size=258)
    figures = [
        evaluate(
            ReferenceModel(folder, dtype=dtype, device=device),
            ReferenceModel(base, dtype=dtype, device=device),
            heldout,
            candidate_subject=SUBJECT,
            base_subject=BASE,
            batch=2,
        )
        for device in ("cpu", "cuda")
    ]
    here, there = figures
    assert there.conventions.device == "cuda"
    assert there.perplexity == pytest.approx(here.perplexity, rel=0.01)
    assert there.base_perplexity == pytest.approx(here.base_perplexity, rel=0.005)
    assert there.kl_mean == pytest.approx(here.kl_mean, rel=0.1)
    assert sum(there.kl_histogram.counts) == there.tokens
