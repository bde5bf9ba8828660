"""From a recipe to a finished checkpoint under work/<key>/, which the same inputs find again."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import narrowgauge
from narrowgauge.flows.progress import Watch
from narrowgauge.quant.evaluate.report import LayerError
from narrowgauge.quant.formats.read import digest
from narrowgauge.quant.recipe import Recipe
from narrowgauge.serving.settings import Settings


@dataclass(frozen=True, kw_only=True)
class QuantizedCheckpoint:
    """A finished checkpoint by URI and digest, and what its making cost. Sizes in bytes, times in seconds.

    `reused` says that an earlier run made it; `quantize_s` is then the time to find and check it.
    """

    uri: str
    digest: str
    base_source: str
    base_digest: str
    scheme: str
    recipe_digest: str
    size_bytes: int
    base_size_bytes: int
    source_s: float
    quantize_s: float
    reused: bool
    layers: tuple[LayerError, ...]


def quantize_recipe(recipe: Recipe, *, settings: Settings, watch: Watch) -> QuantizedCheckpoint:
    """Quantizes the recipe's model, or finds the checkpoint that an earlier run made of the same inputs.

    A second process with the same inputs waits for the first. Raises what `resolve` and `quantize` raise.
    """
    from narrowgauge.quant import sources
    from narrowgauge.quant.pipeline.sequential import Progress, quantize

    def tell(progress: Progress) -> None:
        watch.progress(f"quantize {recipe.model.name} {recipe.scheme_name}", progress.done, progress.total)

    started = time.monotonic()
    base = sources.resolve(recipe.model.source, cache=settings.models)
    source_s = time.monotonic() - started
    watch.line(f"base: {recipe.model.source}, {base.digest[:12]}, {source_s:.1f} s")
    folder = settings.work / work_key(recipe, base.digest)
    folder.mkdir(parents=True, exist_ok=True)
    with _held(folder / "lock"):
        started = time.monotonic()
        made = quantize(recipe, base, folder / "checkpoint", progress=tell)
        quantize_s = time.monotonic() - started
    how = "made of these inputs by an earlier run" if made.reused else f"{quantize_s:.1f} s"
    watch.line(f"quantize: {recipe.scheme_name} by {recipe.method_names}, {made.digest[:12]}, {how}")
    return QuantizedCheckpoint(
        uri=made.path.as_uri(),
        digest=made.digest,
        base_source=recipe.model.source,
        base_digest=base.digest,
        scheme=recipe.scheme_name,
        recipe_digest=recipe.digest,
        size_bytes=made.size_bytes,
        base_size_bytes=made.base_size_bytes,
        source_s=source_s,
        quantize_s=quantize_s,
        reused=made.reused,
        layers=tuple(
            LayerError(name=layer.name, weight_error=layer.weight_error, output_error=layer.output_error)
            for layer in made.layers
        ),
    )


def work_key(recipe: Recipe, base_digest: str) -> str:
    """Names the inputs of a quantization: equal for equal recipes, bases and releases of this program."""
    return digest({"recipe": recipe.digest, "base": base_digest, "narrowgauge": narrowgauge.__version__})[:32]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
