"""Plans for queues made by hand, and a long run of random ones; no model."""

import random

from narrowgauge.engine.kv_cache import KVBlockPool
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.scheduler import SchedulePlan, Scheduler
from narrowgauge.engine.sequence import Sequence, SequenceState


def make_sequence(name: str, prompt: int, *, max_tokens: int = 100) -> Sequence:
    request = Request(request_id=name, prompt_ids=tuple(range(prompt)), params=SamplingParams(max_tokens=max_tokens))
    return Sequence(request=request, seed=0, max_tokens=max_tokens, stop_ids=frozenset(), arrival_s=0.0)


def make_scheduler(
    *, blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 16
) -> tuple[Scheduler, KVBlockPool]:
    pool = KVBlockPool(blocks, block_size)
    return Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=budget), pool


def described(plan: SchedulePlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.sequence.id, chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks]


def advance(scheduler: Scheduler) -> SchedulePlan:
    plan = scheduler.schedule()
    scheduler.commit(plan, {index: 7 for index, chunk in enumerate(plan.chunks) if chunk.samples})
    scheduler.check_integrity()
    return plan


def test_a_prompt_is_cut_to_the_budget_and_samples_at_its_end_only() -> None:
    scheduler, _ = make_scheduler(budget=16)
    scheduler.add(make_sequence("a", 40))
    assert [described(advance(scheduler)) for _ in range(4)] == [
        [("a", 0, 16, False)],
        [("a", 16, 16, False)],
        [("a", 32, 8, True)],
        [("a", 40, 1, True)],
    ]


def test_decodes_go_before_chunks_of_a_long_prompt() -> None:
    scheduler, _ = make_scheduler(budget=8)
    scheduler.add(make_sequence("short", 3))
    advance(scheduler)
    scheduler.add(make_sequence("long", 30))
    assert described(advance(scheduler)) == [("short", 3, 1, True), ("long", 0, 7, False)]
    assert described(advance(scheduler)) == [("short", 4, 1, True), ("long", 7, 7, False)]


def test_no_more_sequences_than_allowed_run_at_once() -> None:
    scheduler, _ = make_scheduler(seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 2))
    assert [name for name, *_ in described(advance(scheduler))] == ["a", "b"]
    assert (scheduler.running, scheduler.waiting) == (2, 1)


def test_a_prompt_is_admitted_only_when_blocks_for_all_of_it_are_free() -> None:
    scheduler, pool = make_scheduler(blocks=10, budget=8)
    scheduler.add(make_sequence("first", 24))
    scheduler.add(make_sequence("second", 20))
    advance(scheduler)
    assert pool.used == 6  # all of the first prompt, though a third of it is computed
    advance(scheduler)
    advance(scheduler)
    assert scheduler.waiting == 1


def test_later_requests_do_not_overtake_one_that_waits_for_blocks() -> None:
    scheduler, _ = make_scheduler(blocks=10, budget=64)
    for name, prompt in (("first", 24), ("big", 20), ("small", 1)):
        scheduler.add(make_sequence(name, prompt))
    assert [name for name, *_ in described(advance(scheduler))] == ["first"]


def test_the_youngest_loses_its_blocks_and_comes_back_first() -> None:
    scheduler, pool = make_scheduler(blocks=5, block_size=4, budget=32)
    old, young, late = make_sequence("old", 7), make_sequence("young", 6), make_sequence("late", 1)
    for sequence in (old, young, late):
        scheduler.add(sequence)
    advance(scheduler)
    assert (old.state, young.state) == (SequenceState.RUNNING, SequenceState.RUNNING)
    plan = advance(scheduler)
    while not plan.preempted:
        plan = advance(scheduler)
    assert plan.preempted[0] in (young, late)
    assert plan.chunks[0].sequence is old
    lost = plan.preempted[0]
    assert (lost.computed, lost.blocks, lost.state) == (0, [], SequenceState.WAITING)
    assert lost.tokens[: lost.prompt_tokens] == list(lost.request.prompt_ids)
    scheduler.remove(old)
    scheduler.check_integrity()
    plan = advance(scheduler)
    assert lost in [chunk.sequence for chunk in plan.chunks]
    assert pool.free >= 0


def test_nobody_is_admitted_in_the_step_that_preempts() -> None:
    scheduler, _ = make_scheduler(blocks=4, block_size=2, budget=16)
    for name in ("a", "b"):
        scheduler.add(make_sequence(name, 2))
    plan = advance(scheduler)
    while not plan.preempted:
        plan = advance(scheduler)
    assert all(chunk.sequence not in plan.preempted for chunk in plan.chunks)


def test_a_scored_prompt_samples_nothing() -> None:
    scheduler, _ = make_scheduler()
    request = Request(request_id="s", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=0, prompt_logprobs=1))
    scheduler.add(Sequence(request=request, seed=0, max_tokens=0, stop_ids=frozenset(), arrival_s=0.0))
    assert described(advance(scheduler)) == [("s", 0, 3, False)]


def test_removal_frees_blocks_in_every_state_and_twice_does_nothing() -> None:
    scheduler, pool = make_scheduler(seqs=1)
    running, waiting = make_sequence("running", 9), make_sequence("waiting", 9)
    scheduler.add(running)
    scheduler.add(waiting)
    advance(scheduler)
    for sequence in (running, waiting, running):
        scheduler.remove(sequence)
    assert (pool.used, scheduler.has_work) == (0, False)


def test_random_arrivals_and_aborts_in_a_tiny_pool_always_progress_and_leak_nothing() -> None:
    rng = random.Random(5)
    scheduler, pool = make_scheduler(blocks=12, block_size=4, seqs=5, budget=9)
    live: list[Sequence] = []
    finished, made = 0, 0
    for step in range(4000):
        if rng.random() < 0.3 and len(live) < 20 and step < 3500:
            length = rng.randint(1, 30)
            live.append(make_sequence(str(made), length, max_tokens=rng.randint(1, 48 - length)))
            scheduler.add(live[-1])
            made += 1
        if live and rng.random() < 0.02:
            scheduler.remove(live.pop(rng.randrange(len(live))))
        plan = advance(scheduler)
        assert plan.tokens <= 9
        assert bool(plan.chunks) == bool(live), "a step without progress"
        for sequence in [s for s in live if s.output_tokens >= s.max_tokens]:
            scheduler.remove(sequence)
            live.remove(sequence)
            finished += 1
    assert not live
    assert pool.used == 0
    assert finished > 200
    assert scheduler.preemptions > 50
