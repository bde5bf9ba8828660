"""The same inputs find the same checkpoint; other inputs get another."""

from collections.abc import Callable
from pathlib import Path

from narrowgauge.flows.progress import Quiet
from narrowgauge.flows.quantize import quantize_recipe, work_key
from narrowgauge.quant.formats.manifest import verify
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving.settings import read_settings


class Told:
    """A Watch that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[tuple[float, float]] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, stage: str, done: float, total: float) -> None:
        self.parts.append((done, total))


def test_a_second_run_finds_the_checkpoint_of_the_first_and_says_so(
    tmp_path: Path, make_recipe: Callable[..., Recipe]
) -> None:
    settings = read_settings({"NG_HOME": str(tmp_path / "ng")})
    first_watch, second_watch = Told(), Told()
    first = quantize_recipe(make_recipe(), settings=settings, watch=first_watch)
    second = quantize_recipe(make_recipe(), settings=settings, watch=second_watch)
    assert (first.reused, second.reused) == (False, True)
    assert (first.uri, first.digest) == (second.uri, second.digest)
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
    assert verify(Path(first.uri.removeprefix("file://"))).digest == first.digest
    assert first_watch.parts[-1][0] == first_watch.parts[-1][1] == 14
    assert "earlier run" in second_watch.lines[-1]
    assert {layer.name for layer in first.layers} >= {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"}


def test_other_inputs_are_kept_apart(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    settings = read_settings({"NG_HOME": str(tmp_path / "ng")})
    four = quantize_recipe(make_recipe(bits=4), settings=settings, watch=Quiet())
    eight = quantize_recipe(make_recipe(bits=8), settings=settings, watch=Quiet())
    assert four.digest != eight.digest
    assert four.size_bytes < eight.size_bytes < four.base_size_bytes
    assert work_key(make_recipe(bits=4), "a") != work_key(make_recipe(bits=4), "b")
