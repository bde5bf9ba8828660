"""Specs: what is read, what is refused with one line, and that the shipped ones stand on their own."""

import copy
from pathlib import Path

import pytest

from narrowgauge.quant.formats.read import plain
from narrowgauge.serving.rollout.spec import Revision, SpecError, load_rollout_spec, read_revision, read_spec

SHIPPED = Path(__file__).resolve().parents[3] / "flows" / "rollouts"
GOOD = {
    "version": 1,
    "model": "m",
    "steps": [{"shadow": 1.0, "until": {"requests": 5}}, {"traffic": 0.0001, "until": {"seconds": 1.5}}],
    "gates": [{"name": "readiness"}],
}


def changed(path, value):
    spec = copy.deepcopy(GOOD)
    place = spec
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return spec


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("modle",), "m", "unknown key .did you mean 'model'.*allowed"),
        (("model",), "", "model: must name the served model"),
        (("version",), 2, "version: 2 is not one of 1"),
        (("steps", 0, "traffic"), 0.5, "either 'shadow' or 'traffic'"),
        (("steps", 0, "shadow"), 0.0, "shadow is 0.0; it must be above 0"),
        (("steps", 1, "traffic"), 1.5, "traffic is 1.5; it must be above 0 and at most 1"),
        (("steps", 1, "traffic"), 0.00005, "units of 0.0001"),
        (("steps", 0, "until"), {}, "until needs 'requests' or 'seconds'"),
        (("steps", 0, "until"), {"requests": 0}, "requests must be at least 1"),
        (("steps", 0, "deadline_s"), 0, "deadline_s is 0.0; it must be above 0"),
        (("deadline_s",), 0.0, "deadline_s is 0.0"),
        (("on_deadline",), "wait", "'wait' is not one of 'abort', 'hold'"),
        (("steps",), [*GOOD["steps"], {"shadow": 1.0, "until": {"requests": 1}}], "shadow steps come first"),
        (("gates",), [{"name": "latencies", "metric": "ttft_s"}], "unknown name 'latencies' .did you mean 'latency'"),
        (("gates",), [{"name": "latency", "metric": "tpot"}], "'tpot' is not one of 'ttft_s', 'itl_p50_s', 'e2e_s'"),
        (("gates",), [{"name": "latency", "metric": "ttft_s", "max_ratio": 0.9}], "max_ratio is 0.9"),
        (("gates",), [{"name": "golden", "prompts": []}], "0 golden prompts"),
        (("gates",), [{"name": "golden", "prompts": [{}, {}]}], "either a 'prompt' or 'messages'"),
        (("gates",), [{"name": "readiness"}, {"name": "readiness"}], "a gate stands there twice"),
        (("engine_args",), {"fd": 3}, None),
        (("engine_args",), {"thread": 1}, r"engine_args.thread: unknown key .did you mean 'threads'.*allowed: dtype"),
        (("engine_args",), {"max_num_seqs": 1}, "engine_args.max_num_seqs: unknown key .did you mean 'max-num-seqs'"),
        (("engine_args",), {"threads": "many"}, r"engine_args.threads: must be a whole number, not 'many' .str"),
        (("engine_args",), {"threads": True}, "engine_args.threads: must be a whole number, not True"),
        (("engine_args",), {"threads": 0}, "engine_args: --threads must be at least 1"),
        (("engine_args",), {"dtype": 16}, "engine_args.dtype: must be text, not 16"),
        (("engine_args",), {"dtype": "int8"}, "engine_args: --dtype must be one of auto"),
        (("engine_args",), {"num-kv-blocks": 1, "kv-cache-bytes": 1}, "engine_args: --num-kv-blocks and"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(path, value, message):
    spec = changed(path, value)
    if message is None:  # a revision is what engine arguments belong to
        with pytest.raises(SpecError, match="'fd' cannot be set here"):
            read_revision({"model": "m", "uri": "u", "digest": "d", "engine_args": value})
        return
    with pytest.raises(SpecError, match=message) as refused:
        read_spec(spec)
    assert refused.value.exit_code == 2


def test_arguments_that_were_accepted_by_another_release_can_still_be_read():
    assert read_spec(changed(("engine_args",), {"thread": 1}), trusted=True).engine_args == {"thread": 1}


def test_a_spec_survives_its_trip_as_json():
    spec = load_rollout_spec(SHIPPED / "demo.yaml")
    assert read_spec(plain(spec)) == spec


@pytest.mark.parametrize("name", ["demo.yaml", "demo-bad.yaml"])
def test_the_shipped_specs_carry_their_golden_prompts(name):
    spec = load_rollout_spec(SHIPPED / name)
    (golden,) = [
        gate
        for gates in (spec.gates, *(step.gates or () for step in spec.steps))
        for gate in gates
        if gate.name == "golden"
    ]
    assert len(golden.prompts) >= 8
    assert all(prompt.max_tokens <= 24 for prompt in golden.prompts)


def test_the_bad_demo_never_gives_more_than_a_tenth_and_shows_users_something():
    spec = load_rollout_spec(SHIPPED / "demo-bad.yaml")
    assert [step.canary_bp for step in spec.steps] == [1000, 1000]
    assert "golden" not in [gate.name for gate in spec.gates_of(0)]
    assert "golden" in [gate.name for gate in spec.gates_of(1)]


def test_a_file_that_a_gate_names_and_that_is_not_there_is_one_line(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("version: 1\nmodel: m\nsteps: []\ngates: [{name: golden, prompts: gone.jsonl}]\n")
    with pytest.raises(SpecError, match=r"gate golden, prompts: gone\.jsonl.*cannot be read: No such file") as refused:
        load_rollout_spec(path)
    assert f"{tmp_path / 'gone.jsonl'} cannot be read" in str(refused.value)  # where it looked
    assert "in its own folder" in str(refused.value)
    (tmp_path / "gone.jsonl").write_text('{"prompt": "a"}\n{broken\n')
    with pytest.raises(SpecError, match=r"gone\.jsonl:2: is not JSON"):
        load_rollout_spec(path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_rollout_spec(tmp_path / "no.yaml")


def test_a_revisions_id_is_that_of_its_content():
    one = Revision(model="m", uri="u", digest="d", engine_args={"threads": 1, "dtype": "auto"})
    same = read_revision({"digest": "d", "uri": "u", "model": "m", "engine_args": {"dtype": "auto", "threads": 1}})
    assert one.id == same.id
    assert len(one.id) == 12
    assert Revision(model="m", uri="u", digest="d", engine_args={"threads": 2, "dtype": "auto"}).id != one.id
