"""Multiple choice: log-likelihoods of transformers' own model, nothing padded, whatever goes through together."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.quant.evaluate.multiple_choice import loglikelihoods
from narrowgauge.quant.evaluate.reference import ReferenceModel
from narrowgauge.quant.evaluate.windows import EvaluationError


class Recorder:
    """A LogitsSource that notes the shapes it is given."""

    name, dtype, attention = "reference", "float32", "sdpa"

    def __init__(self, source):
        self.source, self.shapes = source, []

    def logits(self, ids):
        self.shapes.append(tuple(ids.shape))
        return self.source.logits(ids)


@pytest.fixture
def pairs():
    random = torch.Generator().manual_seed(0)
    lengths = [(1, 1), (5, 1), (5, 1), (9, 3), (2, 7), (9, 3), (30, 2)]
    rows = [[torch.randint(2, 258, (n,), generator=random).tolist() for n in pair] for pair in lengths]
    rows[2][0] = rows[1][0]  # the same context with another answer of one token
    return rows


def test_sums_and_greed_are_those_of_transformers_one_pair_at_a_time(tiny_llama, pairs):
    folder = tiny_llama()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        best = model(torch.tensor([pairs[0][0]])).logits[0, -1].argmax().item()
    pairs.append([pairs[0][0], [best]])
    found = loglikelihoods(ReferenceModel(folder, dtype=torch.float32), pairs)
    for (context, answer), (total, greedy) in zip(pairs, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
        log_p = torch.log_softmax(logits, -1)
        assert total == pytest.approx(log_p[torch.arange(len(answer)), answer].sum().item(), rel=1e-4)
        assert greedy == (log_p.argmax(-1).tolist() == answer)
    assert found[-1][1]


def test_rows_of_one_length_go_together_unpadded_and_equal_rows_once(tiny_llama, pairs):
    source = Recorder(ReferenceModel(tiny_llama(), dtype=torch.float32))
    together = loglikelihoods(source, pairs)
    assert source.shapes == [(1, 31), (2, 11), (1, 8), (1, 5), (1, 1)]
    one_by_one = loglikelihoods(source, pairs, batch_tokens=1)
    assert [total for total, _ in one_by_one] == pytest.approx([total for total, _ in together], rel=1e-5)


def test_a_row_that_is_too_long_loses_the_beginning_of_its_context(tiny_llama, pairs):
    source = Recorder(ReferenceModel(tiny_llama(), dtype=torch.float32))
    context, answer = pairs[-1]
    cut = loglikelihoods(source, [(context, answer)], longest=10)
    assert source.shapes == [(1, 10)]
    assert cut == loglikelihoods(source, [((context + answer)[-11:-2], answer)])


@pytest.mark.parametrize("pair", [([], [5]), ([5], []), ([5], [6] * 20)])
def test_what_cannot_be_scored_is_refused(tiny_llama, pair):
    with pytest.raises(EvaluationError, match="cannot be scored"):
        loglikelihoods(ReferenceModel(tiny_llama(), dtype=torch.float32), [pair], longest=10)


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
QUESTIONS = [
    ("What colour is the sky on a clear day?", ["blue", "a deep shade of green", "square"], 0),
    ("What do cows drink when they are thirsty?", ["stones", "water", "the whole of the moon"], 1),
    ("Which of these is a fruit?", ["a chair", "gravel from the road", "apple"], 2),
    ("How many legs does a spider have?", ["eight", "two", "one hundred and six"], 0),
    ("What is frozen water called?", ["fire", "ice", "a long winter coat"], 1),
]
COMPARE = """
import json, sys, torch
import lm_eval
from pathlib import Path
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from narrowgauge.quant.evaluate.evaluate import load_tokenizer
from narrowgauge.quant.evaluate.multiple_choice import TaskRequest, _adapter, run_tasks
from narrowgauge.quant.evaluate.reference import ReferenceModel
from lm_eval.api.instance import Instance
model, tasks = sys.argv[1:3]
pairs = [tuple(pair) for pair in json.loads(sys.argv[3])]
requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
theirs = HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=4)
source = ReferenceModel(Path(model), dtype=torch.float32)
ours = _adapter(source, load_tokenizer(Path(model)), 2048)
other = lm_eval.simple_evaluate(model=theirs, tasks=["colours"], task_manager=TaskManager(include_path=tasks))["results"]["colours"]
scores = run_tasks(source, source, load_tokenizer(Path(model)), request=TaskRequest(("colours",), path=Path(tasks)))
print("RESULT" + json.dumps({
    "ours": ours.loglikelihood(requests), "theirs": theirs.loglikelihood(requests),
    "scores": {s.metric: [s.value, s.stderr, s.base_value, s.samples] for s in scores},
    "other": {k.partition(",")[0]: v for k, v in other.items()},
}))
"""


@pytest.mark.peers
def test_log_likelihoods_and_scores_are_those_of_lm_evals_own_model(smollm2, tmp_path):
    """NG_PEER_LM_EVAL names a Python that has lm-eval beside what narrowgauge needs."""
    python = os.environ.get("NG_PEER_LM_EVAL")
    if not python:
        pytest.skip("NG_PEER_LM_EVAL names no Python with lm-eval")
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": q, "choices": c, "answer": a}) + "\n" for q, c, a in QUESTIONS)
    )
    (tmp_path / "colours.yaml").write_text(TASK.format(questions=questions))
    pairs = [(f"Question: {q}\nAnswer:", f" {choice}") for q, choices, _ in QUESTIONS for choice in choices]
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [python, "-c", COMPARE, str(smollm2), str(tmp_path), json.dumps(pairs)],
        env={**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("RESULT")[2])
    for (ours, ours_greedy), (theirs, theirs_greedy) in zip(found["ours"], found["theirs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-3)
        assert ours_greedy == theirs_greedy
    for metric, (value, stderr, base, samples) in found["scores"].items():
        assert value == base == found["other"][metric]
        assert stderr == pytest.approx(found["other"][f"{metric}_stderr"])
        assert samples == len(QUESTIONS)
    assert found["scores"].keys() == {"acc", "acc_norm"}
