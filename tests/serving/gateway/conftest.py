"""A small world for the gateway: replicas that speak OpenAI and misbehave on demand, and a gateway on real sockets."""

import asyncio
import contextlib
import inspect
import json
import threading

import aiohttp
import httpx
import pytest
from aiohttp import web

from narrowgauge.serving.gateway.admin import admin_app
from narrowgauge.serving.gateway.app import Gateway, public_app
from narrowgauge.serving.gateway.config import GatewayConfig
from narrowgauge.serving.gateway.process import Server
from narrowgauge.serving.gateway.replicas import ProbeRules
from narrowgauge.serving.sockets import async_admin_client, bind_tcp, bind_unix

QUICK = ProbeRules(interval_s=0.05, timeout_s=0.5)
WORDS = ("The", " quick", " brown", " fox", ".")


async def _until(condition):
    """Waits, at most 10 s, until the condition (a function, perhaps async) holds."""
    async with asyncio.timeout(10):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.005)


class FakeReplica:
    """An OpenAI-speaking server in a thread of its own. Knobs may be turned while it runs.

    `mode`: ok | status (answers `status`) | no_headers (cuts before headers) | no_data (headers and a comment, then cuts)
    | one_word (cuts after one event) | no_end (leaves out the end mark) | error_first | error_later (in-band) | silent.
    `count`: how many requests the mode holds for (None: all). `gate`: held back after the first word while it is clear.
    """

    def __init__(self, revision):
        self.revision = revision
        self.mode, self.status, self.count = "ok", 503, None
        self.gap_s = self.first_delay_s = 0.0
        self.ready = True
        self.words = WORDS
        self.requests, self.cut_off = [], 0
        self.gate = threading.Event()
        self.gate.set()
        self._transports = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        with bind_tcp("127.0.0.1", 0, listening=False) as sock:
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.revive()

    def revive(self):
        """Listens (again) at its port."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def kill(self):
        """As SIGKILL would: nobody listens, every connection is reset."""
        asyncio.run_coroutine_threadsafe(self._kill(), self._loop).result(10)

    def close(self):
        self.gate.set()
        asyncio.run_coroutine_threadsafe(self._kill(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self):
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, bind_tcp("127.0.0.1", self.port)).start()

    async def _kill(self):
        for transport in list(self._transports):
            transport.abort()
        await self._runner.cleanup()

    async def _ready(self, request):
        self._transports.add(request.transport)
        return web.json_response({}, status=200 if self.ready else 503)

    async def _answer(self, request):
        self._transports.add(request.transport)
        body = await request.json()
        self.requests.append((request.path, dict(request.headers), body))
        mode = self.mode
        if self.count is not None:
            self.count -= 1
            mode = mode if self.count >= 0 else "ok"
        try:
            if mode == "status":
                error = {"error": {"message": "not now", "type": "server_error", "param": None, "code": self.status}}
                return web.json_response(error, status=self.status, headers={"retry-after": "7"})
            if mode == "no_headers":
                request.transport.abort()
            if mode == "silent":
                await asyncio.sleep(60)
            if body.get("stream"):
                return await self._stream(request, body, mode)
            return await self._whole(body)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise

    async def _whole(self, body):
        await asyncio.sleep(self.first_delay_s)
        await _until(self.gate.is_set)
        choice = {"index": 0, "message": {"role": "assistant", "content": "".join(self.words)}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": len(self.words), "total_tokens": 7 + len(self.words)}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"]}
        answer |= {"choices": [choice], "usage": usage, "system_fingerprint": self.revision}
        return web.json_response(answer)

    async def _stream(self, request, body, mode):
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-engine": "fake",
                "x-narrowgauge-ignored-fields": "frobnicate",
                "x-narrowgauge-role": "liar",
            }
        )
        await response.prepare(request)
        await response.write(b": queued\n\n")
        if mode == "no_data":
            request.transport.abort()
        await asyncio.sleep(self.first_delay_s)
        failure = {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": 500}}
        for number, word in enumerate(self.words):
            if (mode, number) in {("error_first", 0), ("error_later", 2)}:
                await response.write(self._event(failure))
                return response
            last = number + 1 == len(self.words)
            await response.write(self._event(self._chunk(body, {"content": word}, "stop" if last else None)))
            if number == 0:
                await _until(self.gate.is_set)
                if mode == "one_word":
                    request.transport.abort()
            await asyncio.sleep(self.gap_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": len(self.words), "total_tokens": 7 + len(self.words)}
            await response.write(self._event({**self._chunk(body, {}, None), "choices": [], "usage": usage}))
        if mode != "no_end":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, body, delta, finish):
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {**chunk, "system_fingerprint": self.revision, "choices": [choice]}

    @staticmethod
    def _event(value):
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class World:
    """A running gateway: `http` speaks to its public port, `admin` to its socket, `gateway` is the thing itself."""

    def __init__(self, gateway, http, admin, url):
        self.gateway, self.http, self.admin, self.url = gateway, http, admin, url

    async def set(self, *, model="m", epoch=1, stable=(), canary=(), extra=(), canary_bp=0, shadow_bp=0):
        """Puts a state in force made of these fake replicas; the revisions are those of the first ones."""
        replicas = {}
        for replica in (*stable, *canary, *extra):
            replicas.setdefault(replica.revision, []).append(replica.url)
        state = {"epoch": epoch, "stable": stable[0].revision, "canary": canary[0].revision if canary else None}
        state |= {"canary_bp": canary_bp, "shadow_bp": shadow_bp, "replicas": replicas}
        response = await self.admin.put(f"/admin/v1/traffic/{model}", json=state)
        assert response.status_code == 200, response.text
        return state

    async def chat(self, *, headers=None, **fields):
        """One chat completion; whole, whatever `stream` says."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def records(self, count):
        """The records, once there are at least `count`."""
        found = []

        async def enough():
            found[:] = (await self.admin.get("/admin/v1/records?after=0")).json()["records"]
            return len(found) >= count

        await _until(enough)
        return found


@pytest.fixture
def replica():
    """Makes fake replicas: `replica("r1")`."""
    with contextlib.ExitStack() as stack:

        def make(revision="stable-1"):
            made = FakeReplica(revision)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def until():
    """Waits until a condition holds: `await until(lambda: …)`."""
    return _until


@pytest.fixture
def world(tmp_path):
    """Opens gateways: `async with world(comment_s=0.1) as w`. Probes are quick; every setting can be given."""

    @contextlib.asynccontextmanager
    async def opened(*, probes=QUICK, **settings):
        config = GatewayConfig(probes=probes, **settings)
        async with contextlib.AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(Gateway.opened(config, folder=tmp_path / "traffic"))
            public, admin = bind_tcp("127.0.0.1", 0), bind_unix(tmp_path / "gateway.sock")
            url = f"http://127.0.0.1:{public.getsockname()[1]}"
            servers = [Server(public_app(gateway)), Server(admin_app(gateway))]
            running = [
                asyncio.create_task(server.serve(sockets=[sock]))
                for server, sock in zip(servers, (public, admin), strict=True)
            ]
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False))
            speaking = async_admin_client(f"unix:{tmp_path}/gateway.sock")
            try:
                yield World(gateway, http, await stack.enter_async_context(speaking), url)
            finally:
                for server in servers:
                    server.should_exit = True
                gateway.expire()
                await asyncio.gather(*running)

    return opened


@pytest.fixture
async def raw():
    """A client whose streams are read chunk by chunk."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        yield session
