"""The asynchronous front on a tiny random model with a byte tokenizer."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from narrowgauge.engine.async_engine import AsyncEngine, EngineBusy, EngineDead
from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.request import PromptTooLong, Request, RequestOutput, SamplingParams

PROMPT = tuple(b"hello there")


@pytest.fixture
async def engine(make_llama: Callable[..., Path]) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(model=make_llama(), dtype="float32", threads=1, max_waiting=6, max_num_seqs=4))
    await engine.ready()
    yield engine
    await engine.shutdown()


def make_request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
    return Request(request_id=name, prompt_ids=prompt, params=SamplingParams(**settings))  # type: ignore[arg-type]


async def collect(engine: AsyncEngine, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what the engine's thread shows in its statistics only."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the thread has no event to wait for
            await asyncio.sleep(0.005)


async def test_concurrent_streams_each_end_once_with_their_own_totals(engine: AsyncEngine) -> None:
    streams = await asyncio.gather(*(collect(engine, make_request(str(n), max_tokens=n)) for n in range(1, 7)))
    for n, outputs in enumerate(streams, start=1):
        assert [output.finish_reason for output in outputs].count("length") == 1
        assert outputs[-1].finish_reason == "length"
        assert sum(len(output.token_ids) for output in outputs) == outputs[-1].output_tokens == n
        assert outputs[-1].prompt_tokens == len(PROMPT)
        timing = outputs[-1].timing
        assert timing is not None
        assert timing.scheduled_s is not None
        assert timing.first_token_s is not None
        assert timing.arrival_s <= timing.scheduled_s <= timing.first_token_s <= timing.finished_s
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.generated_tokens == 21
    assert stats.prompt_tokens == 6 * len(PROMPT)


async def test_two_live_requests_may_share_an_id(engine: AsyncEngine) -> None:
    first, second = await asyncio.gather(collect(engine, make_request("id")), collect(engine, make_request("id")))
    assert [o.token_ids for o in first if o.token_ids]
    assert sum((o.token_ids for o in first), ()) == sum((o.token_ids for o in second), ())
    assert first[-1].request_id == "id"


async def test_a_stop_string_ends_the_output_before_itself_and_frees_the_blocks(engine: AsyncEngine) -> None:
    whole = "".join(o.text for o in await collect(engine, make_request(max_tokens=40)))
    stop = whole[10:13]
    outputs = await collect(engine, make_request(max_tokens=40, stop=(stop,)))
    assert "".join(o.text for o in outputs) == whole[: whole.find(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert outputs[-1].output_tokens < 40
    await until(lambda: engine.stats().kv_blocks_used == 0)


async def test_closing_a_stream_frees_its_blocks_and_leaves_the_others_alone(engine: AsyncEngine) -> None:
    alone = await collect(engine, make_request(max_tokens=30))
    other = asyncio.create_task(collect(engine, make_request(max_tokens=30)))
    async with engine.generate(make_request(max_tokens=400)) as stream:
        await anext(stream)
    outputs = await other
    assert sum((o.token_ids for o in outputs), ()) == sum((o.token_ids for o in alone), ())
    await until(lambda: engine.stats().kv_blocks_used == 0)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_dropped_stream_frees_its_blocks(engine: AsyncEngine) -> None:
    stream = engine.generate(make_request(max_tokens=400))
    await anext(stream)
    assert engine.stats().kv_blocks_used > 0
    del stream
    gc.collect()
    await until(lambda: engine.stats().kv_blocks_used == 0)


async def test_a_cancelled_reader_frees_its_blocks(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, make_request(max_tokens=400)))
    await until(lambda: engine.stats().kv_blocks_used > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    await until(lambda: engine.stats().kv_blocks_used == 0)


async def test_abort_by_id_ends_the_stream_with_that_reason(engine: AsyncEngine) -> None:
    stream = engine.generate(make_request("mine", max_tokens=400))
    await anext(stream)
    engine.abort("somebody else's")
    engine.abort("mine")
    outputs = [output async for output in stream]
    assert outputs[-1].finish_reason == "abort"
    await until(lambda: engine.stats().kv_blocks_used == 0)


async def test_a_full_queue_refuses_and_takes_requests_again_later(engine: AsyncEngine) -> None:
    streams = []

    def fill() -> None:
        for _ in range(50):
            streams.append(engine.generate(make_request(max_tokens=200)))  # noqa: PERF401 - kept where one is refused

    with pytest.raises(EngineBusy, match="max-waiting 6"):
        fill()
    assert len(streams) >= 6
    for stream in streams:
        await stream.aclose()
    await until(lambda: engine.stats().waiting == 0)
    assert (await collect(engine, make_request()))[-1].finish_reason == "length"


async def test_a_request_that_cannot_be_served_is_refused_before_it_is_queued(engine: AsyncEngine) -> None:
    with pytest.raises(PromptTooLong, match="512 tokens"):
        engine.generate(make_request(prompt=(1,) * 600))
    assert engine.stats().waiting == 0


async def test_a_slow_reader_gets_everything_in_fewer_outputs(engine: AsyncEngine) -> None:
    stream = engine.generate(make_request(max_tokens=20, logprobs=2))
    await until(lambda: engine.stats().steps > 0 and engine.stats().running == 0)
    outputs = [output async for output in stream]
    assert len(outputs) < 20
    assert sum(len(o.token_ids) for o in outputs) == 20
    assert sum(len(o.logprobs or ()) for o in outputs) == 20


async def test_prompt_scores_come_once_and_alone_where_nothing_is_generated(engine: AsyncEngine) -> None:
    outputs = await collect(engine, make_request(max_tokens=0, prompt_logprobs=3))
    assert len(outputs) == 1
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [s.chosen.token_id for s in scores if s] == list(PROMPT[1:])
    assert (outputs[0].finish_reason, outputs[0].output_tokens) == ("length", 0)


async def test_the_heartbeat_shows_that_an_idle_loop_lives(engine: AsyncEngine) -> None:
    await asyncio.sleep(0)
    await until(lambda: engine.stats().heartbeat_age_s < 0.1)
    assert engine.is_ready


async def test_an_error_in_the_loop_fails_every_stream_and_every_later_request(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [engine.generate(make_request(max_tokens=400)) for _ in range(3)]
    await anext(streams[0])

    def broken(self: LLMEngine) -> None:
        raise ZeroDivisionError("kaputt")

    monkeypatch.setattr(LLMEngine, "step", broken)
    for stream in streams:
        with pytest.raises(EngineDead, match="ZeroDivisionError: kaputt"):
            async for _ in stream:
                pass
    with pytest.raises(EngineDead, match="kaputt"):
        engine.generate(make_request())
    assert not engine.is_ready
    assert isinstance(engine.death, ZeroDivisionError)


async def test_shutdown_fails_what_runs_and_joins_the_thread(engine: AsyncEngine) -> None:
    stream = engine.generate(make_request(max_tokens=400))
    await anext(stream)
    await engine.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        async for _ in stream:
            pass
    assert not engine._thread.is_alive()
    await engine.shutdown()


async def test_a_checkpoint_that_cannot_be_loaded_fails_ready_with_its_own_error(tmp_path: Path) -> None:
    engine = AsyncEngine(EngineConfig(model=tmp_path))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        await engine.ready()
    with pytest.raises(EngineDead):
        engine.generate(make_request())
    await engine.shutdown()
