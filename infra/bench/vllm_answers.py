"""Whether vLLM reads our 4-bit files: its greedy answers on a CPU against transformers' on the same checkpoint.

    python infra/bench/vllm_answers.py --work WORK --vllm PEER/bin/python

vLLM computes in float16, the most exact of the two dtypes that its 4-bit kernel knows on a CPU, and transformers in float32.
(In bfloat16 a logit near 16 is known to 0.125, and transformers itself parts from its own float32 answers.) An answer counts
as the same where it is token for token the same, or the same up to a token where the float32 logits of the two lie within two
steps of float16. Writes results/vllm-<machine>.json: how many of the questions are answered the same, how many to the last
token, and the worst tie.
"""

import argparse
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_material as shared
import torch
from peer_runs import call, installed, told_versions
from quality_material import W4G64, Material, say
from transformers import AutoModelForCausalLM

from narrowgauge.cli.results import make_result, write_result
from narrowgauge.kernels.hardware import cpu_class

HERE = Path(__file__).resolve().parent
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan, and what is it known for?",
    "How many days are there in a week? Name them.",
    "Write a Python function that adds two numbers.",
    "Who wrote Pride and Prejudice?",
    "Translate to French: good morning.",
    "What is water made of?",
    "Count from one to ten.",
)
TOKENS = 24
STEPS = 2.0
"""How many steps of float16 two logits may be apart and still pass for equal: the error of each is one at best."""

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "gptq_w4g64": ([{"name": "gptq"}], W4G64),
    "awq_w4g64": ([{"name": "awq"}], W4G64),
}
"""Name -> (methods, scheme); symmetric only: transformers 5.24 itself does not load packed zero points (their shapes differ)."""


@dataclass(frozen=True)
class Comparison:
    """One answer: the tokens that both gave from the start, whether that is all of it, and where not, how far apart the two
    next tokens are to transformers, in steps of float16."""

    common: int
    equal: bool
    steps: float

    @property
    def same(self) -> bool:
        """Equal, or parted at a tie."""
        return self.equal or self.steps <= STEPS


def ask_vllm(material: Material, folder: Path, prompts: list[list[int]], *, python: Path) -> list[list[int]]:
    """vLLM's answers; those of an earlier run where checkpoint, questions and vLLM are the same."""
    told = json.dumps([installed(python), prompts, TOKENS]).encode() + (HERE / "peer_vllm_cpu.py").read_bytes()
    kept = material.work / f"vllm-{shared.content(folder)}-{hashlib.sha256(told).hexdigest()[:12]}.json"

    def ask() -> dict[str, Any]:
        ids, answers = material.work / "vllm-prompts.json", material.work / "vllm-answers.json"
        ids.write_text(json.dumps(prompts))
        told = [
            "--model",
            str(folder),
            "--ids",
            str(ids),
            "--tokens",
            str(TOKENS),
            "--dtype",
            "float16",
            "--output",
            str(answers),
        ]
        call(python, "peer_vllm_cpu.py", told, log=material.work / "vllm.log")
        found: dict[str, Any] = json.loads(answers.read_bytes())
        return found

    answers: list[list[int]] = shared.remembered(kept, ask)["answers"]
    return answers


def compare(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[Comparison]:
    """Each of vLLM's answers against transformers' own, up to the end of the answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            own = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS)[
                0, len(prompt) :
            ].tolist()
            theirs = answer[: answer.index(end) + 1] if end in answer else answer
            common = next((i for i, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), None)
            if common is None:
                found.append(Comparison(len(own), own == theirs, 0.0))
                continue
            logits = model(torch.tensor([prompt + own[:common]])).logits[0, -1]
        apart = (logits[own[common]] - logits[theirs[common]]).abs().item()
        found.append(Comparison(common, False, apart / float16_step(logits[own[common]].item())))
    return found


def float16_step(value: float) -> float:
    """The distance between float16 numbers near `value`: 11 bits of significand, the first of them implied."""
    return float(2.0 ** (math.frexp(value)[1] - 11))


def make_rows(name: str, found: list[Comparison]) -> list[dict[str, Any]]:
    """How many answers agree, and how far the worst tie is from one."""
    figures = {
        "same_answers": (f"of {len(found)}", float(sum(one.same for one in found))),
        "equal_to_the_last_token": (f"of {len(found)}", float(sum(one.equal for one in found))),
        "worst_tie": ("float16 steps", round(max(one.steps for one in found), 3)),
    }
    return [
        {
            "name": f"{name}/{figure}",
            "unit": unit,
            "ours": value,
            "peer": None,
            "peer_name": None,
            "ratio": None,
            "ours_min": value,
            "ours_max": value,
            "peer_min": None,
            "peer_max": None,
        }
        for figure, (unit, value) in figures.items()
    ]


def main() -> None:
    """Asks vLLM and transformers and writes the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, texts and checkpoints; reused")
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", required=True, help="of an environment that has vllm-cpu"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--output", type=Path, help="results file (default: results/vllm-<machine>.json)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    python = arguments.vllm.absolute()
    material = shared.prepare(arguments.work.absolute(), samples=arguments.samples)
    prompts = [
        material.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    rows = []
    for name in arguments.only:
        methods, scheme = CASES[name]
        folder = shared.run_ours(material, shared.make_recipe(material, methods, scheme, seed=0))
        found = compare(folder, prompts, ask_vllm(material, folder, prompts, python=python))
        for question, one in zip(QUESTIONS, found, strict=True):
            parted = "equal" if one.equal else f"parts after {one.common} tokens, {one.steps:.2f} steps apart"
            say(f"{name}: {question} {parted}")
        rows += make_rows(name, found)
    versions = told_versions({"vllm-cpu": installed(python)})
    only = "" if arguments.only == list(CASES) else f" --only {' '.join(arguments.only)}"
    command = f"python infra/bench/vllm_answers.py --work WORK --vllm VLLM/bin/python{only}"
    output = arguments.output or HERE / "results" / f"vllm-{cpu_class()}.json"
    write_result(output, make_result("vllm", rows, command, packages=shared.LIBRARIES, peer_versions=versions))
    say(f"written: {output}")


if __name__ == "__main__":
    main()
