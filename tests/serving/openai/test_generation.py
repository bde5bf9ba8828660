"""The API over the real engine with a tiny random model, judged by transformers."""

import asyncio
import json
import shutil

import httpx
import pytest
from safetensors.torch import load_file, save_file

from narrowgauge.engine.async_engine import AsyncEngine
from narrowgauge.engine.config import EngineConfig
from narrowgauge.serving.app import create_app
from narrowgauge.serving.health import ReplicaIdentity

GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPTS = ["The capital of France is", "Once upon a time there was a", "1, 2, 3,"]


@pytest.fixture(scope="module")
def engine(tiny_llama):
    config = EngineConfig(model=tiny_llama, dtype="float32", threads=1, max_model_len=128, max_num_seqs=4)
    engine = AsyncEngine(config)
    asyncio.run(engine.ready())
    yield engine
    asyncio.run(engine.shutdown())


@pytest.fixture(scope="module")
def oracle(tiny_llama):
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)

    @torch.no_grad()
    def log_probabilities(ids):
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return log_probabilities


@pytest.fixture
async def client(engine):
    app = create_app(engine, identity=ReplicaIdentity(model="tiny", revision="r", digest="d"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
        yield client


async def complete(client, **fields):
    answer = await client.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_scored_prompt_has_transformers_log_probabilities(client, engine, oracle):
    ids = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 2)
    body = await complete(
        client, prompt=ids, echo=True, max_tokens=0, logprobs=20, return_tokens_as_token_ids=True, temperature=0
    )
    expected = oracle(ids)
    lists = body["choices"][0]["logprobs"]
    assert lists["tokens"] == [f"token_id:{i}" for i in ids]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        row = expected[position - 1]
        assert lists["token_logprobs"][position] == pytest.approx(row[ids[position]].item(), abs=2e-4)
        best = row.topk(20)
        top = lists["top_logprobs"][position]
        assert {f"token_id:{i}" for i in best.indices.tolist()} <= set(top)
        assert set(top) - {f"token_id:{i}" for i in best.indices.tolist()} <= {f"token_id:{ids[position]}"}
        assert sorted(top.values(), reverse=True)[:20] == pytest.approx(best.values.tolist(), abs=2e-4)


async def test_generated_tokens_are_the_likeliest_and_carry_their_log_probabilities(client, engine, oracle):
    ids = engine.tokenizer.encode(PROMPTS[0])
    fields = {"prompt": ids, "logprobs": 3, "return_tokens_as_token_ids": True, "ignore_eos": True, **GREEDY}
    lists = (await complete(client, **fields))["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == GREEDY["max_tokens"]
    for name, logprob in zip(lists["tokens"], lists["token_logprobs"], strict=True):
        row = oracle(ids)[-1]
        assert name == f"token_id:{row.argmax().item()}"
        assert logprob == pytest.approx(row.max().item(), abs=2e-4)
        ids.append(row.argmax().item())


async def test_a_stream_says_the_same_as_the_whole_answer(client):
    from openai import AsyncOpenAI

    official = AsyncOpenAI(base_url="http://replica/v1", api_key="none", http_client=client, max_retries=0)
    messages = [{"role": "user", "content": "Tell me a story."}]
    for fields in (GREEDY, {"temperature": 1.0, "seed": 5, "max_tokens": 20}, {"stop": ["a", "e"], **GREEDY}):
        whole = await official.chat.completions.create(model="tiny", messages=messages, **fields)
        stream = await official.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert ends == [whole.choices[0].finish_reason]


async def test_prompts_together_give_what_each_gives_alone(client):
    together = await complete(client, prompt=PROMPTS, **GREEDY)
    alone = [await complete(client, prompt=prompt, **GREEDY) for prompt in PROMPTS]
    assert [choice["text"] for choice in together["choices"]] == [body["choices"][0]["text"] for body in alone]
    for name in together["usage"]:
        assert together["usage"][name] == sum(body["usage"][name] for body in alone)


async def test_copies_differ_by_seed_and_can_be_had_again(client):
    fields = {"prompt": PROMPTS[1], "n": 3, "seed": 11, "max_tokens": 12}
    first = [choice["text"] for choice in (await complete(client, **fields))["choices"]]
    again = [choice["text"] for choice in (await complete(client, **fields))["choices"]]
    third = (await complete(client, **{**fields, "n": 1, "seed": 13}))["choices"][0]["text"]
    assert first == again
    assert len(set(first)) == 3
    assert first[2] == third


async def test_echo_gives_the_prompt_back_with_its_score_and_the_answer(client, engine):
    fields = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, **GREEDY}
    body = await complete(client, **fields)
    plain = await complete(client, prompt=PROMPTS[0], **GREEDY)
    assert body["choices"][0]["text"] == PROMPTS[0] + plain["choices"][0]["text"]
    lists = body["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == body["usage"]["total_tokens"]
    assert "".join(lists["tokens"]).startswith(PROMPTS[0])
    assert body["usage"] == plain["usage"]


async def test_a_prompt_as_long_as_the_context_can_be_scored_but_not_continued(client):
    ids = [100] * 128
    scored = await complete(client, prompt=ids, echo=True, max_tokens=0, logprobs=0)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 128
    refused = await client.post("/v1/completions", json={"prompt": ids})
    assert refused.status_code == 400
    assert "128 tokens" in refused.json()["error"]["message"]
    last = await complete(client, prompt=ids[:-1], ignore_eos=True)
    assert last["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("fields", [{"logit_bias": {"49152": 1}}, {"prompt": [49152]}, {"stop_token_ids": [10**6]}])
async def test_ids_beyond_the_vocabulary_harm_nobody(client, fields):
    neighbour = asyncio.create_task(complete(client, prompt=PROMPTS[0], **GREEDY))
    answer = await client.post("/v1/completions", json={"prompt": "a", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(fields))
    assert (await neighbour)["choices"][0]["finish_reason"] in ("stop", "length")


async def test_tokenize_and_detokenize_are_inverse_and_know_chats(client, engine):
    text = "naïve café 🦙 <|im_start|>"
    body = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 128
    assert (await client.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = (await client.post("/tokenize", json={"messages": messages})).json()
    assert chat["tokens"] == engine.tokenizer.chat(messages)
    assert chat["token_strs"] is None
    bad = await client.post("/detokenize", json={"tokens": [49152]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens")
    for wrong in ({"prompt": 5}, {}, {"messages": 5}):
        assert (await client.post("/tokenize", json=wrong)).status_code == 400


@pytest.fixture(scope="module")
def broken_engine(tiny_llama, tmp_path_factory):
    """The model with NaN in its last norm."""
    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("broken") / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = AsyncEngine(EngineConfig(model=folder, dtype="float32", threads=1, max_model_len=128))
    asyncio.run(engine.ready())
    yield engine
    asyncio.run(engine.shutdown())


async def test_a_numerically_broken_model_answers_500_with_its_name_also_in_band_and_the_replica_lives(broken_engine):
    app = create_app(broken_engine, identity=ReplicaIdentity(model="tiny", revision="r", digest="d"))
    asked = [
        {"prompt": "a", "temperature": 0},
        {"prompt": "a", "temperature": 1, "top_p": 0.9, "logprobs": 3, "n": 2},
        {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 5},
        {"prompt": "a", "frequency_penalty": 1.0, "repetition_penalty": 1.1},
    ]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
        for fields in asked:
            answer = await client.post("/v1/completions", json=fields)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith("tiny: the model is numerically broken")
        stream = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        first, second = [line for line in stream.text.split("\n\n") if line.startswith("data: ")]
        assert json.loads(first.removeprefix("data: "))["error"]["code"] == 500
        assert second == "data: [DONE]"
        metrics = (await client.get("/metrics")).text
        finished = 'narrowgauge_requests_finished_total{finished_reason="error",model="tiny",role="stable"}'
        count = next(line for line in metrics.splitlines() if line.startswith(finished))
        assert float(count.rpartition(" ")[2]) >= len(asked) + 1
    assert broken_engine.is_ready
