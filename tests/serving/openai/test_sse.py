import asyncio
import json

import pytest

from narrowgauge.serving.openai.sse import DONE, ClientGone, EventStream, event, while_connected


class Connection:
    """One ASGI exchange: what was sent, and a client that leaves when told to."""

    def __init__(self):
        self.sent = []
        self._news = asyncio.Condition()
        self.leaves = asyncio.Event()
        self.closed = 0

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        async with self._news:
            self.sent.append(message)
            self._news.notify_all()

    async def until(self, condition):
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(condition), 5)

    async def close(self):
        self.closed += 1

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_headers_and_a_comment_go_out_before_the_first_event():
    connection, first = Connection(), asyncio.Event()

    async def events():
        await first.wait()
        yield event({"a": 1})

    answer = EventStream(events(), close=connection.close)
    task = asyncio.create_task(answer({}, connection.receive, connection.send))
    await connection.until(lambda: len(connection.sent) == 2)
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert connection.body == b": queued\n\n"
    first.set()
    await task
    assert connection.body == b': queued\n\ndata: {"a":1}\n\n'
    assert connection.sent[-1]["more_body"] is False
    assert connection.closed == 1


async def test_silence_is_filled_with_comments():
    connection, last = Connection(), asyncio.Event()

    async def events():
        await last.wait()
        yield DONE

    answer = EventStream(events(), close=connection.close, heartbeat_s=0.01)
    task = asyncio.create_task(answer({}, connection.receive, connection.send))
    await connection.until(lambda: connection.body.count(b": alive\n\n") == 2)
    last.set()
    await task
    assert connection.body.endswith(DONE)


async def test_a_reader_who_takes_the_end_slowly_gets_it_all_the_same():
    class SlowAtTheEnd(Connection):
        async def send(self, message):
            if message.get("more_body") is False:
                await asyncio.sleep(0.1)  # several heartbeats
            await super().send(message)

    async def events():
        yield DONE

    connection = SlowAtTheEnd()
    await EventStream(events(), close=connection.close, heartbeat_s=0.01)({}, connection.receive, connection.send)
    assert connection.sent[-1]["more_body"] is False


async def test_a_client_who_leaves_ends_the_work():
    connection, ended = Connection(), asyncio.Event()

    async def events():
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.set()

    answer = EventStream(events(), close=connection.close)
    task = asyncio.create_task(answer({}, connection.receive, connection.send))
    await connection.until(lambda: connection.sent)
    connection.leaves.set()
    await asyncio.wait_for(task, 5)
    assert ended.is_set()
    assert connection.closed == 1


async def test_a_crash_of_the_events_is_raised_after_closing():
    connection = Connection()

    async def events():
        yield b"x"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await EventStream(events(), close=connection.close)({}, connection.receive, connection.send)
    assert connection.closed == 1


async def test_work_is_returned_while_the_client_stays():
    connection = Connection()

    async def work():
        return 7

    assert await while_connected(connection.receive, work()) == 7


async def test_work_is_cancelled_when_the_client_leaves():
    connection, cancelled = Connection(), []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    task = asyncio.create_task(while_connected(connection.receive, work()))
    await asyncio.sleep(0)
    connection.leaves.set()
    with pytest.raises(ClientGone):
        await task
    assert cancelled == [True]


def test_an_event_is_one_line_of_json_whatever_the_text_holds():
    text = 'a\nb\u2028"é\U0001f600'
    data = event({"text": text})
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert json.loads(data.removeprefix(b"data: ")) == {"text": text}
