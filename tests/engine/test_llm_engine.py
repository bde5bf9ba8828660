"""Greedy tokens on the real model against transformers' generate, however the work is cut up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from narrowgauge.engine.config import EngineConfig, EngineConfigError
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.request import PositionLogprobs, PromptTooLong, Request, RequestError, SamplingParams
from narrowgauge.quant.formats.base import QuantizedWeight
from narrowgauge.quant.formats.compressed_tensors import CompressedTensors
from narrowgauge.quant.formats.scheme import Scheme, WeightScheme

Tokens = list[list[int]]
Greedy = Callable[..., Tokens]


def test_prompts_run_together_give_transformers_greedy_tokens(
    smollm2: Path, prompts: Tokens, expected: Tokens, greedy: Greedy
) -> None:
    assert len(prompts) >= 16
    assert greedy(smollm2, prompts) == expected


def test_prompts_run_one_at_a_time_give_transformers_greedy_tokens(
    smollm2: Path, prompts: Tokens, expected: Tokens, greedy: Greedy
) -> None:
    assert greedy(smollm2, prompts, max_num_seqs=1) == expected


def test_prompts_in_tiny_chunks_give_transformers_greedy_tokens(
    smollm2: Path, prompts: Tokens, expected: Tokens, greedy: Greedy
) -> None:
    assert greedy(smollm2, prompts, max_num_batched_tokens=7, max_num_seqs=5) == expected


def test_preempted_sequences_resume_with_the_same_tokens(smollm2: Path, prompts: Tokens, expected: Tokens) -> None:
    config = EngineConfig(
        model=smollm2, dtype="float32", max_model_len=128, num_kv_blocks=20, max_num_batched_tokens=32
    )
    engine = LLMEngine(config, eos_ids=frozenset())
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=32, temperature=0.0)
        engine.add_request(Request(request_id=str(index), prompt_ids=tuple(prompt), params=params))
    tokens: Tokens = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            assert output.token_id is not None
            tokens[int(output.request_id)].append(output.token_id)
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert tokens == expected


@pytest.mark.parametrize("path", [{"kernels": "reference"}, {"attention_backend": "reference"}])
def test_the_eager_twins_give_the_same_tokens(
    smollm2: Path, prompts: Tokens, expected: Tokens, greedy: Greedy, path: dict[str, str]
) -> None:
    assert greedy(smollm2, prompts[:6], new_tokens=12, **path) == [tokens[:12] for tokens in expected[:6]]


def test_a_quantized_checkpoint_gives_the_tokens_that_transformers_gets_from_it(
    smollm2: Path,
    prompts: Tokens,
    greedy: Greedy,
    greedy_oracle: Callable[[Path, Tokens], Tokens],
    tmp_path: Path,
) -> None:
    folder = round_to_nearest(smollm2, tmp_path / "w4", WeightScheme(bits=4, group=64))
    assert greedy(folder, prompts[:8]) == greedy_oracle(folder, prompts[:8])


def test_int4_and_dequantized_linears_agree_on_most_tokens_in_bfloat16(
    smollm2: Path, prompts: Tokens, greedy: Greedy, tmp_path: Path
) -> None:
    folder = round_to_nearest(smollm2, tmp_path / "w4", WeightScheme(bits=4, group=64))
    packed, dense = (
        greedy(folder, prompts[:8], new_tokens=8, dtype="bfloat16", linear=linear) for linear in ("int4", "dequantize")
    )
    agreeing = [p[0] == d[0] for p, d in zip(packed, dense, strict=True)]
    assert sum(agreeing) >= 7  # the first token: later ones follow different texts once one differs


def test_an_end_token_stops_the_output_and_is_counted_but_hidden(
    make_llama: Callable[..., Path], greedy: Greedy
) -> None:
    folder = make_llama()
    free = greedy(folder, [[1, 2, 3]], new_tokens=8)[0]
    engine = LLMEngine(EngineConfig(model=folder, dtype="float32"), eos_ids=frozenset({free[4]}))
    engine.add_request(Request(request_id="r", prompt_ids=(1, 2, 3), params=SamplingParams(temperature=0.0)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    stop_at = free.index(free[4])
    assert [output.token_id for output in outputs] == free[: stop_at + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason, outputs[-1].hidden) == ("stop", None, True)


def test_min_tokens_masks_the_end_token(make_llama: Callable[..., Path], greedy: Greedy) -> None:
    folder = make_llama()
    first = greedy(folder, [[1, 2, 3]], new_tokens=1)[0][0]
    engine = LLMEngine(EngineConfig(model=folder, dtype="float32"), eos_ids=frozenset({first}))
    params = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=6)
    engine.add_request(Request(request_id="r", prompt_ids=(1, 2, 3), params=params))
    tokens = []
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    assert len(tokens) >= 5
    assert first not in tokens[:5]


def test_abort_frees_the_blocks_at_once_and_leaves_the_others_alone(
    make_llama: Callable[..., Path], greedy: Greedy
) -> None:
    folder = make_llama()
    alone = greedy(folder, [[9, 8, 7]], new_tokens=12)[0]
    engine = LLMEngine(EngineConfig(model=folder, dtype="float32", max_num_batched_tokens=40), eos_ids=frozenset())
    for name, prompt in (("kept", (9, 8, 7)), ("running", (1,) * 20), ("prefilling", (2,) * 100)):
        params = SamplingParams(temperature=0.0, max_tokens=12)
        engine.add_request(Request(request_id=name, prompt_ids=prompt, params=params))
    tokens = [output.token_id for output in engine.step() if output.request_id == "kept"]
    engine.abort("running")
    engine.abort("prefilling")
    engine.abort("unknown")
    assert engine.stats().kv_blocks_used == 1
    engine.check_integrity()
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    assert tokens == alone


def test_requests_that_cannot_be_served_are_refused_with_the_figures(make_llama: Callable[..., Path]) -> None:
    engine = LLMEngine(EngineConfig(model=make_llama(), max_model_len=64), eos_ids=frozenset())

    def refused(prompt: tuple[int, ...], **params: object) -> RequestError:
        with pytest.raises(RequestError) as caught:
            engine.add_request(Request(request_id="r", prompt_ids=prompt, params=SamplingParams(**params)))  # type: ignore[arg-type]
        return caught.value

    assert "empty" in str(refused(()))
    assert refused((272,)).param == "prompt"
    assert refused((-1,)).param == "prompt"
    assert refused((1,), stop_token_ids=(10**6,)).param == "stop_token_ids"
    assert refused((1,), logit_bias={999999: -100.0}).param == "logit_bias"
    assert isinstance(refused((1,) * 64), PromptTooLong)
    assert "64 tokens" in str(refused((1,) * 65))
    assert "at most 4 tokens" in str(refused((1,) * 60, max_tokens=5))
    engine.add_request(Request(request_id="twice", prompt_ids=(1,)))
    with pytest.raises(RequestError, match="running already"):
        engine.add_request(Request(request_id="twice", prompt_ids=(1,)))


def test_an_output_fills_the_context_where_max_tokens_is_left_open(make_llama: Callable[..., Path]) -> None:
    engine = LLMEngine(EngineConfig(model=make_llama(), max_model_len=40, dtype="float32"), eos_ids=frozenset())
    engine.add_request(
        Request(request_id="r", prompt_ids=(1,) * 33, params=SamplingParams(max_tokens=None, temperature=0.0))
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert len(outputs) == 7
    assert outputs[-1].finish_reason == "length"


def test_a_context_that_the_cache_cannot_hold_is_refused_with_the_length_that_fits(
    make_llama: Callable[..., Path],
) -> None:
    folder = make_llama()
    with pytest.raises(EngineConfigError, match="--max-model-len 64"):
        LLMEngine(EngineConfig(model=folder, max_model_len=128, num_kv_blocks=4), eos_ids=frozenset())
    with pytest.raises(EngineConfigError, match="512 positions"):
        LLMEngine(EngineConfig(model=folder, max_model_len=1024), eos_ids=frozenset())
    assert LLMEngine(EngineConfig(model=folder, num_kv_blocks=4), eos_ids=frozenset()).limits.max_model_len == 64


def test_a_seeded_sample_is_the_same_in_any_company(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()

    def sampled(others: int, *, position: int, **engine_args: int) -> list[int | None]:
        engine = LLMEngine(EngineConfig(model=folder, dtype="float32", **engine_args), eos_ids=frozenset())  # type: ignore[arg-type]
        for index in range(others + 1):
            mine = index == position
            params = SamplingParams(max_tokens=24, seed=42 if mine else None, top_p=0.95)
            prompt = (5, 6, 7, 8, 9) if mine else tuple(range(10 + index, 30 + index))
            engine.add_request(Request(request_id="mine" if mine else str(index), prompt_ids=prompt, params=params))
        tokens = []
        while engine.has_work:
            tokens += [output.token_id for output in engine.step() if output.request_id == "mine"]
        return tokens

    alone = sampled(0, position=0)
    assert len(set(alone)) > 5
    assert sampled(6, position=0) == alone
    assert sampled(6, position=6) == alone
    assert sampled(6, position=3, max_num_batched_tokens=3) == alone
    assert sampled(6, position=6, max_model_len=64, num_kv_blocks=7) == alone


def test_prompt_scores_are_transformers_in_chunks_and_after_preemption(make_llama: Callable[..., Path]) -> None:
    folder = make_llama()
    prompts = [tuple((7 * i + 11 * n) % 256 for i in range(30)) for n in range(4)]
    engine = LLMEngine(
        EngineConfig(model=folder, dtype="float32", max_num_batched_tokens=13, max_model_len=64, num_kv_blocks=9),
        eos_ids=frozenset(),
    )
    for n, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=30, temperature=0.0, prompt_logprobs=4, logprobs=0)
        engine.add_request(Request(request_id=str(n), prompt_ids=prompt, params=params))
    scores: dict[str, tuple[PositionLogprobs | None, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.prompt_logprobs is not None:
                assert output.request_id not in scores
                scores[output.request_id] = output.prompt_logprobs
    assert engine.stats().preemptions > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for n, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        first, *rest = scores[str(n)]
        assert first is None
        assert [entry.chosen.token_id for entry in rest if entry] == list(prompt[1:])
        for position, entry in enumerate(rest):
            assert entry is not None
            assert entry.chosen.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
            assert [t.token_id for t in entry.top] == expected[position].topk(4).indices.tolist()


def round_to_nearest(base: Path, folder: Path, scheme: WeightScheme) -> Path:
    """A compressed-tensors checkpoint of `base` with every block's Linears rounded to the nearest code."""
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    linears = [n.removesuffix(".weight") for n in weights if n.endswith("_proj.weight")]
    for name in linears:
        weight = weights.pop(f"{name}.weight").float()
        grouped = weight.view(weight.shape[0], -1, scheme.group or weight.shape[1])
        scales = (grouped.abs().amax(-1) / ((scheme.qmax - scheme.qmin) / 2)).bfloat16()
        codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(scheme.qmin, scheme.qmax)
        packed = CompressedTensors().pack(
            QuantizedWeight(codes=codes.view(weight.shape).to(torch.int8), scales=scales), Scheme(weights=scheme)
        )
        weights |= {f"{name}.{local}": tensor for local, tensor in packed.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    by_name = dict.fromkeys(linears, Scheme(weights=scheme))
    config["quantization_config"] = CompressedTensors().config(by_name, ("lm_head",))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
