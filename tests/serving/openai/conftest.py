"""An engine that plays a script, so that what the API makes of the engine's words can be tested by itself."""

import json
from types import SimpleNamespace

import httpx
import pytest

from narrowgauge.engine.request import RequestLimits, RequestOutput
from narrowgauge.serving.app import create_app
from narrowgauge.serving.health import ReplicaIdentity


class Letters:
    """A tokenizer whose ids are code points."""

    longest_token = 4
    has_chat_template = True

    def encode(self, text, *, add_special_tokens=True):
        return [1, *map(ord, text)] if add_special_tokens else [ord(letter) for letter in text]

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def token_str(self, token_id):
        return chr(token_id)

    def render_chat(self, messages, *, add_generation_prompt=True, **variables):
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        text += "".join(f"<{name}={value}>" for name, value in variables.items()) + ">" * add_generation_prompt
        return (text,)

    def encode_chat(self, pieces):
        return self.encode("".join(pieces), add_special_tokens=False)


class ScriptedEngine:
    """Answers every request with the outputs (or errors) of `script`; remembers what was asked and what was closed."""

    def __init__(self, folder):
        self.config = SimpleNamespace(model=folder, max_num_seqs=4, max_waiting=4)
        self.tokenizer, self.max_model_len, self.vocab_size = Letters(), 100, 2000
        self.death = None
        self.refusal = None
        self.script = [says("He"), says("llo"), ends("stop")]
        self.requests, self.closed, self.aborted = [], [], []

    def generate(self, request):
        RequestLimits(vocab_size=self.vocab_size, max_model_len=self.max_model_len, pool_tokens=1000).check(request)
        if self.refusal and len(self.requests) >= self.refusal[0]:
            raise self.refusal[1]
        self.requests.append(request)
        return ScriptedStream(self, request)

    def abort(self, request_id):
        self.aborted.append(request_id)

    def stats(self):
        return SimpleNamespace(
            running=0,
            waiting=0,
            kv_blocks_total=1,
            kv_blocks_used=0,
            preemptions=0,
            steps=0,
            heartbeat_age_s=0.0,
            fragmentation=0.0,
        )


class ScriptedStream:
    def __init__(self, engine, request):
        self._engine, self._request = engine, request
        self._script, self._tokens = iter(engine.script), 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        step = next(self._script, None)
        if step is None:
            raise StopAsyncIteration
        if isinstance(step, Exception):
            raise step
        self._tokens += len(step.get("token_ids", ()))
        return RequestOutput(
            request_id=self._request.request_id,
            prompt_tokens=len(self._request.prompt_ids),
            output_tokens=self._tokens,
            **step,
        )

    async def aclose(self):
        self._engine.closed.append(self._request.request_id)


def says(text, **more):
    """One step of a script: a text, one token a letter."""
    return {"text": text, "token_ids": tuple(map(ord, text)), **more}


def ends(reason, **more):
    """The last step of a script."""
    return {"finish_reason": reason, **more}


class Api:
    """A client of the application over one engine."""

    def __init__(self, engine, app):
        self.engine, self.app = engine, app
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://replica")

    async def chat(self, **fields):
        fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=fields)

    async def complete(self, **fields):
        return await self.http.post("/v1/completions", json={"prompt": "hi", **fields})

    async def metric(self, name):
        text = (await self.http.get("/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def events(response):
    """The `data:` events of a stream, parsed; checks that [DONE] is the last."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert "[DONE]" not in lines[:-1]
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def script():
    return SimpleNamespace(says=says, ends=ends, events=events)


@pytest.fixture
async def api(tmp_path):
    engine = ScriptedEngine(tmp_path)
    app = create_app(engine, identity=ReplicaIdentity(model="m", revision="rev1", digest="d" * 64))
    client = Api(engine, app)
    async with client.http:
        yield client
