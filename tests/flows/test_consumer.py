"""The consumer counts who answered and every way a request can fail, against a scripted server."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from narrowgauge.flows.consumer import REVISION_HEADER, Consumer, ConsumerError, Served


def chunk(text: str, finish: str | None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


class Script:
    """What the server does next: "good", "refuse", "cut" (no end) or "anonymous" (no revision header)."""

    def __init__(self) -> None:
        self.mode = "good"
        self.revision = "aaa"
        self.sessions: list[str] = []


def make_app(script: Script) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> object:
        script.sessions.append(request.headers["x-session-id"])
        if script.mode == "refuse":
            return JSONResponse({"error": {"message": "no", "type": "server_error"}}, status_code=503)

        async def events() -> AsyncIterator[str]:
            for text in "abc":
                yield f"data: {chunk(text, None)}\n\n"
                await asyncio.sleep(0.001)
            if script.mode != "cut":
                yield f"data: {chunk('', 'stop')}\n\n"
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


def test_a_consumer_that_never_started_has_seen_nothing() -> None:
    assert Consumer("http://127.0.0.1:1/v1", "m").stop() == Served()
