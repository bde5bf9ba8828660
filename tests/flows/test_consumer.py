"""The consumer counts who answered and every way a request can fail, against a scripted server."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from narrowgauge.flows.consumer import REVISION_HEADER, Consumer, ConsumerError, Served


def chunk(text: str, finish: str | None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def usage(tokens: int) -> str:
    counts = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": [], "usage": counts})


class Script:
    """What the server does next: "good", "refuse", "cut" (no end), "anonymous" (no revision header)
    or "slow" (waits for `hold`). `tokens` is what the usage says, None for none."""

    def __init__(self) -> None:
        self.mode = "good"
        self.revision = "aaa"
        self.sessions: list[str] = []
        self.tokens: int | None = 3
        self.hold = threading.Event()


def make_app(script: Script) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> object:
        mode = script.mode
        script.sessions.append(request.headers["x-session-id"])
        assert (await request.json())["stream_options"] == {"include_usage": True}
        if script.mode == "refuse":
            return JSONResponse({"error": {"message": "no", "type": "server_error"}}, status_code=503)

        async def events() -> AsyncIterator[str]:
            if mode == "slow":
                await asyncio.to_thread(script.hold.wait, 30)
            for text in "abc":
                yield f"data: {chunk(text, None)}\n\n"
                await asyncio.sleep(0.001)
            if script.mode != "cut":
                yield f"data: {chunk('', 'stop')}\n\n"
                if script.tokens is not None:
                    yield f"data: {usage(script.tokens)}\n\n"
            yield "data: [DONE]\n\n"

        headers = {} if script.mode == "anonymous" else {REVISION_HEADER: script.revision}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    return app


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(script), log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


def test_answers_are_counted_by_revision_each_in_a_session_of_its_own(script: Script, url: str) -> None:
    consumer = Consumer(url, "m", in_flight=3)
    consumer.start()
    consumer.wait_for_more(5, timeout_s=30)
    before = consumer.served()
    script.revision = "bbb"
    consumer.wait_for_more(6, timeout_s=30)
    after = consumer.stop()
    assert set(before.answers) == {"aaa"}
    assert after.since(before)["bbb"] >= 3
    assert after.failures == ()
    assert after.total == len(script.sessions) == len(set(script.sessions))
    assert after.stream_tokens_s["aaa"] > 0


@pytest.mark.parametrize(
    ("mode", "says"), [("refuse", "503"), ("cut", "finish_reason"), ("anonymous", REVISION_HEADER)]
)
def test_every_request_without_a_whole_named_answer_is_a_failure(
    script: Script, url: str, mode: str, says: str
) -> None:
    script.mode = mode
    consumer = Consumer(url, "m", in_flight=1)
    consumer.start()
    with pytest.raises(ConsumerError, match=says):
        consumer.wait_for_more(1, timeout_s=3)
    served = consumer.stop()
    assert served.total == 0
    assert says in served.failures[0]


@pytest.mark.parametrize("tokens", [None, 1])
def test_speed_is_counted_in_tokens_not_in_chunks(script: Script, url: str, tokens: int | None) -> None:
    script.tokens = tokens  # of an answer in three chunks
    consumer = Consumer(url, "m", in_flight=1)
    consumer.start()
    consumer.wait_for_more(2, timeout_s=30)
    served = consumer.stop()
    assert served.failures == ()
    assert served.stream_tokens_s == {}


def test_waiting_for_what_is_open_waits_for_the_slowest_and_not_for_what_came_later(script: Script, url: str) -> None:
    script.mode = "slow"
    consumer = Consumer(url, "m", in_flight=2)
    consumer.start()
    while len(script.sessions) < 2:
        time.sleep(0.01)
    script.mode = "good"
    with pytest.raises(ConsumerError, match=r"requests \d+.* were not answered within 0 s"):
        consumer.wait_for_open(timeout_s=0.3)
    script.hold.set()
    consumer.wait_for_open(timeout_s=30)
    consumer.stop()


def test_a_consumer_that_never_started_has_seen_nothing() -> None:
    assert Consumer("http://127.0.0.1:1/v1", "m").stop() == Served()
