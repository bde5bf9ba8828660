"""What an engine tells about itself. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot; counters are totals since the start.

    kv_blocks_used counts blocks that some sequence holds; fragmentation is (free - longest free run) / free, 0 when none is free.
    heartbeat_age_s: seconds since the step loop last came round, whether or not it had work.
    step_tokens counts the tokens that all steps carried (prompt and output, recomputed ones again).
    """

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    step_tokens: int
    heartbeat_age_s: float
    fragmentation: float
