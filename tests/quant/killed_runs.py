"""Runs `quantize` in child processes that kill themselves: a program for test_sequential_resume.py, one JSON line a request.

Request: {"recipe": {...}, "base": FOLDER, "output": FOLDER, "kill_at": N}. The child counts what it does to the disk (file
made durable, renamed, removed; before and after each) and ends by SIGKILL at the N-th; 0 lets it finish.
Answer: {"killed": bool, "events": N, "digest": HEX | null, "resumed": BLOCKS, "error": TEXT | null}.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from narrowgauge.quant.formats.read import build, lookup
from narrowgauge.quant.methods.base import METHODS, QuantMethod
from narrowgauge.quant.pipeline.sequential import quantize
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import resolve

_WATCHED = ("fsync", "replace", "rename", "unlink", "link", "rmdir")


class _Killer:
    """Counts calls that change what a crash would leave, and ends the process at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.events = 0
        self._kill_at = kill_at
        for name in _WATCHED:
            setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._event()
            result = original(*arguments, **named)
            self._event()
            return result

        return call

    def _event(self) -> None:
        self.events += 1
        if self.events == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    recipe = build(Recipe, request["recipe"], registries={QuantMethod: METHODS})
    base = resolve(request["base"], cache=Path(request["base"]).parent / "cache")
    killer = _Killer(request["kill_at"])
    try:
        result = quantize(recipe, base, Path(request["output"]))
    except Exception:  # noqa: BLE001  # the test shows it
        return {"events": killer.events, "digest": None, "resumed": 0, "error": traceback.format_exc()}
    return {"events": killer.events, "digest": result.digest, "resumed": result.resumed, "error": None}


def _in_child(request: dict[str, Any]) -> dict[str, Any]:
    """Runs a request in a fork of this process, which has imported everything and computed nothing yet."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as answer:
            json.dump(_run(request), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True, "events": 0, "digest": None, "resumed": 0, "error": None}
    return {"killed": False, **json.loads(text)}


def _import_what_children_need() -> None:
    """Done once here, so that no child spends its time on it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from narrowgauge.quant.formats.base import get_format

    assert AutoTokenizer is not None
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))
    get_format("compressed-tensors")
    for name in METHODS:
        lookup(METHODS, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _import_what_children_need()
    for line in sys.stdin:
        print(json.dumps(_in_child(json.loads(line))), flush=True)
