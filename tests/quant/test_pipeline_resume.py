"""The work folder: one owner, one set of inputs, and only what a record speaks of is believed."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from narrowgauge.quant.pipeline.activations import StatesShape
from narrowgauge.quant.pipeline.results import BlockResult, KVResult, LayerResult, SmoothingResult
from narrowgauge.quant.pipeline.resume import ResumeError, work_folder, workspace
from narrowgauge.quant.pipeline.shards import TensorNotWritten

FINGERPRINT = {
    "recipe": {"methods": [{"name": "gptq", "damping": 0.01}], "scheme": {"bits": 4}},
    "base": "ab" * 32,
    "versions": {"torch": "2.13.0"},
    "compute": {"threads": 2},
}
STATES = StatesShape(batches=(2, 1), length=4, width=8, dtype="bfloat16")
RESULT = BlockResult(
    layers=(
        LayerResult(name="a.0.q", scheme="W4A16", weight_error=0.1, output_error=0.1 / 3, fallback=None, seconds=1.5),
    ),
    smoothing=(SmoothingResult(method="awq", linears=("a.0.q",), smallest=0.5, largest=2.0),),
    kv_cache=KVResult(name="a.0.attn", key=(0.1, 0.2), value=(0.3, 0.3)),
)


def _save(space, count: int) -> None:
    for _ in range(count):
        index = len(space.records)
        space.states(index + 1).write_bytes(bytes(STATES.size_bytes))
        space.save_block({f"a.{index}.q.weight": torch.full((3, 2), float(index))}, RESULT, STATES)
    space.settle()


def test_finished_blocks_come_back_as_they_were_saved(tmp_path):
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        assert space.records == []
        _save(space, 2)
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        assert [record.result for record in space.records] == [RESULT] * 2
        assert space.records[1].states == STATES
        assert float(load_file(space.parts()[1])["a.1.q.weight"].max()) == 1
        # Of the hidden states only those that the next block needs are kept.
        assert [path.name for path in space.folder.glob("*.bin")] == ["inputs-00002.bin"]
        assert space.kept_work() == f"; 2 finished blocks are kept in {space.folder}"


def test_what_no_record_speaks_of_is_removed(tmp_path):
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        _save(space, 1)
        for name in ("block-00001.safetensors", ".block-00001.safetensors.tmp", "inputs-00002.bin", ".x.1.tmp"):
            (space.folder / name).write_bytes(b"half")
        space.stage()
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        names = sorted(path.name for path in space.folder.iterdir())
    assert names == ["block-00000.json", "block-00000.safetensors", "fingerprint.json", "inputs-00001.bin", "lock"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": "cd" * 32}, f'base: "{"ab" * 18}... then, "{"cd" * 18}... now'),
        ({"versions": {"torch": "2.12.1"}}, 'versions.torch: "2.13.0" then, "2.12.1" now'),
        ({"compute": {"threads": 1}}, "compute.threads: 2 then, 1 now"),
        (
            {"recipe": {"methods": [{"name": "gptq", "damping": 0.05}], "scheme": {"bits": 8}}},
            "recipe.methods[0].damping: 0.01 then, 0.05 now; recipe.scheme.bits: 4 then, 8 now",
        ),
        ({"calibration": "ef"}, 'calibration: null then, "ef" now'),
    ],
    ids=["base", "version", "threads", "recipe", "calibration"],
)
def test_other_inputs_are_refused_with_the_difference_and_the_work_stays(tmp_path, change, said):
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        _save(space, 1)
    with workspace(tmp_path / "out") as space, pytest.raises(ResumeError) as caught:
        space.begin(FINGERPRINT | change)
    message = str(caught.value)
    assert said in message
    assert "--fresh" in message
    assert len(message.splitlines()) == 1
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        assert len(space.records) == 1
        space.begin(FINGERPRINT | change, fresh=True)
        assert space.records == []
        assert sorted(path.name for path in space.folder.iterdir()) == ["fingerprint.json", "lock"]


def test_without_a_finished_block_nothing_stands_in_the_way_of_other_inputs(tmp_path):
    output = tmp_path / "out"
    with workspace(output) as space:
        space.begin(FINGERPRINT)
        assert work_folder(output).exists()
    assert not work_folder(output).exists()


def test_a_second_process_is_told_in_one_line(tmp_path):
    program = (
        "import sys; from pathlib import Path; from narrowgauge.quant.pipeline.resume import workspace\n"
        "with workspace(Path(sys.argv[1])) as space:\n    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ResumeError, match=r"another process is at work on this checkpoint"),
            workspace(tmp_path / "out"),
        ):
            pass
        other.communicate("")
    with workspace(tmp_path / "out") as space:
        assert space.folder == tmp_path / ".out.work"


def test_a_block_that_the_disk_refuses_is_not_recorded(tmp_path):
    output = tmp_path / "out"
    with workspace(output) as space:
        space.begin(FINGERPRINT)
        _save(space, 1)
        space.part(1).mkdir()  # the rename onto it fails
        with pytest.raises(TensorNotWritten, match=r"block-00001\.safetensors"):
            _save(space, 1)
        assert len(space.records) == 1
    with workspace(output) as space:
        space.begin(FINGERPRINT)
        assert len(space.records) == 1


def test_a_damaged_record_or_part_is_named(tmp_path):
    with workspace(tmp_path / "out") as space:
        space.begin(FINGERPRINT)
        _save(space, 2)
        space.part(1).write_bytes(b"cut")
    with (
        workspace(tmp_path / "out") as space,
        pytest.raises(ResumeError, match=r"block-00001\.safetensors: is damaged"),
    ):
        space.begin(FINGERPRINT)
    (space.folder / "block-00001.json").write_text("{")
    with workspace(tmp_path / "out") as space, pytest.raises(ResumeError, match=r"block-00001\.json: is damaged"):
        space.begin(FINGERPRINT)


def test_a_step_before_the_blocks_is_made_once(tmp_path):
    made = []

    def make() -> list[float]:
        made.append(1)
        return [0.1 + 0.2]

    for _ in range(2):
        with workspace(tmp_path / "out") as space:
            space.begin(FINGERPRINT)
            assert space.kept("allocation", make) == [0.1 + 0.2]
    assert made == [1]
