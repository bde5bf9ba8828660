"""Each act is held to what must happen in it; each run has a home of its own."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from narrowgauge.flows.demo import (
    BAD_RECIPE,
    BAD_SPEC,
    GOOD_RECIPE,
    GOOD_SPEC,
    Context,
    judge_act_one,
    judge_act_three,
    judge_act_two,
    new_home,
    run_demo,
)
from narrowgauge.flows.evaluate import Judgement
from narrowgauge.flows.progress import Quiet
from narrowgauge.flows.quantize import QuantizedCheckpoint
from narrowgauge.flows.release import ReleaseOutcome
from narrowgauge.flows.rollout import RolloutOutcome
from narrowgauge.flows.settings import read_flow_settings
from narrowgauge.quant.recipe import load_recipe
from narrowgauge.serving.registry import ModelVersion
from narrowgauge.serving.rollout.spec import load_rollout_spec


def version(digest: str, verdict: str = "passed") -> ModelVersion:
    return ModelVersion(
        name="m", version=1, digest=digest, uri="file:///x", verdict=verdict, scheme=None, aliases=(), tags={}
    )


def outcome(digest: str, *, passed: bool, rollout: RolloutOutcome | None = None) -> ReleaseOutcome:
    checkpoint = QuantizedCheckpoint(
        uri="file:///x",
        digest=digest,
        base_source="s",
        base_digest="b",
        scheme="W4A16",
        recipe_digest="r",
        size_bytes=1,
        base_size_bytes=4,
        source_s=0.0,
        quantize_s=0.0,
        reused=False,
        layers=(),
    )
    judgement = Judgement(
        report=cast(Any, None), passed=passed, reasons=() if passed else ("KL mean 9 > 1",), checks=()
    )
    verdict = "passed" if passed else "rejected"
    return ReleaseOutcome(checkpoint=checkpoint, judgement=judgement, version=version(digest, verdict), rollout=rollout)


def ended(phase: str, gate: str | None = None) -> RolloutOutcome:
    return RolloutOutcome(id="1", revision="rev", phase=phase, reason="because", gate=gate, phases=())


def context(champion: str | None = "good", candidate: str | None = "good", **answers: int) -> Context:
    return Context(
        champion=version(champion) if champion else None,
        candidate=version(candidate) if candidate else None,
        answers=answers,
    )


def test_act_one_must_end_with_the_released_version_as_champion() -> None:
    good = outcome("good", passed=True, rollout=ended("Completed"))
    assert judge_act_one(good, context()) == []
    assert "champion" in judge_act_one(good, context(champion="base"))[0]
    aborted = dataclasses.replace(good, rollout=ended("Aborted", "latency"))
    assert "Aborted by gate latency: because" in judge_act_one(aborted, context())[0]


def test_act_two_must_be_stopped_before_any_rollout() -> None:
    assert judge_act_two(outcome("bad", passed=False), context()) == []
    assert judge_act_two(outcome("bad", passed=True), context())
    assert "candidate" in judge_act_two(outcome("bad", passed=False), context(candidate="bad"))[0]


def test_act_three_must_be_ended_by_the_golden_gate_after_some_answers() -> None:
    bad = outcome("bad", passed=False, rollout=ended("Aborted", "golden"))
    assert judge_act_three(bad, context(rev=3)) == []
    assert "answered" in judge_act_three(bad, context())[0]
    assert "champion" in judge_act_three(bad, context(champion="bad", rev=3))[0]
    by_another = dataclasses.replace(bad, rollout=ended("Aborted", "errors"))
    assert "golden" in judge_act_three(by_another, context(rev=3))[0]


@pytest.mark.parametrize(
    ("phase", "gate", "code"),
    [("Completed", None, 0), ("Aborted", "golden", 3), ("Aborted", None, 1)],
)
def test_the_exit_code_tells_a_gate_from_a_failure(phase: str, gate: str | None, code: int) -> None:
    assert outcome("x", passed=True, rollout=ended(phase, gate)).exit_code == code


def test_each_run_has_a_home_of_its_own_with_shared_models_and_work(tmp_path: Path) -> None:
    first, second = new_home(tmp_path), new_home(tmp_path)
    assert (first, second) == (tmp_path / "demo" / "1", tmp_path / "demo" / "2")
    (first / "work" / "made").mkdir()
    assert (second / "work" / "made").is_dir()
    assert (second / "models").resolve() == tmp_path / "models"


def test_the_shipped_recipes_and_specs_fit_together() -> None:
    names = {load_recipe(path).model.name for path in (GOOD_RECIPE, BAD_RECIPE)}
    specs = [load_rollout_spec(path) for path in (GOOD_SPEC, BAD_SPEC)]
    assert names == {spec.model for spec in specs} == {"smollm2"}
    assert [step.canary_bp for step in specs[1].steps] == [1000] * len(specs[1].steps)
    assert specs[0].engine_args["threads"] == specs[1].engine_args["threads"] == 1


@pytest.mark.parametrize("keep", [False, True])
def test_a_demo_that_is_interrupted_leaves_no_copies_of_checkpoints_unless_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    def interrupted(stage: object, recipe: object) -> None:
        artifacts = tmp_path / "demo" / "1" / "artifacts"
        artifacts.mkdir()
        (artifacts / "model.safetensors").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowgauge.flows.demo._Stage.resolve_base", interrupted)
    monkeypatch.setenv("NG_HOME", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_demo(read_flow_settings(), Quiet(), keep=keep)
    assert (tmp_path / "demo" / "1" / "artifacts").exists() == keep
