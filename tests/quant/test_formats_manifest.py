"""The manifest: the digest is of the bytes, and damage is found and named."""

import hashlib
import json

import pytest

from narrowgauge.quant.formats.manifest import (
    Base,
    CheckpointDamaged,
    read_manifest,
    verify,
    write_atomically,
    write_manifest,
)

BASE = Base(source="hf:org/model@abc", revision="abc", digest="0" * 64)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.bin").write_bytes(b"two")
    (folder / "sub" / "a.bin").write_bytes(b"one")
    write_manifest(folder, base=BASE, recipe_digest="1" * 64, versions={"torch": "2.13.0"})
    return folder


def test_the_digest_is_sha256_of_the_canonical_file_list(checkpoint):
    files = [
        {"path": "b.bin", "sha256": hashlib.sha256(b"two").hexdigest(), "size": 3},
        {"path": "sub/a.bin", "sha256": hashlib.sha256(b"one").hexdigest(), "size": 3},
    ]
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    assert verify(checkpoint).digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_digest_ignores_what_the_checkpoint_was_made_from(checkpoint):
    before = read_manifest(checkpoint).digest
    after = write_manifest(checkpoint, base=Base(source="elsewhere"))
    assert after.digest == before
    assert read_manifest(checkpoint).base.source == "elsewhere"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "b.bin").write_bytes(b"twO"), "SHA-256 differs"),
        (lambda folder: (folder / "b.bin").write_bytes(b"longer"), "has 6 bytes, the manifest says 3"),
        (lambda folder: (folder / "b.bin").unlink(), "listed in the manifest but missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "never finished"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema": 1}'), "files: is missing"),
    ],
)
def test_damage_is_found_and_named(checkpoint, damage, message):
    damage(checkpoint)
    with pytest.raises(CheckpointDamaged, match=message):
        verify(checkpoint)


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a//b", "", "a\\b", "./a"])
def test_a_manifest_that_points_outside_its_folder_is_refused(checkpoint, path):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][0]["path"] = path
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointDamaged, match="stay inside the checkpoint"):
        verify(checkpoint)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
