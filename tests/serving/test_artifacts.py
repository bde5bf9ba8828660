"""A checkpoint in the store is whole or absent; what is fetched has the digest that was asked for."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from narrowgauge.quant.formats.manifest import Base, CheckpointDamaged, write_manifest
from narrowgauge.serving.artifacts import ArtifactError, fetch, store
from narrowgauge.serving.registry import RegisterRequest, Registry
from narrowgauge.serving.settings import Settings, read_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings({"NG_HOME": str(tmp_path / "ng")})


def checkpoint(folder: Path, content: bytes = b"weights") -> str:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "extra").mkdir()
    (folder / "extra" / "config.json").write_text("{}")
    return write_manifest(folder, base=Base(source="test")).digest


def test_a_stored_checkpoint_is_fetched_from_its_uri(tmp_path: Path, settings: Settings) -> None:
    digest = checkpoint(tmp_path / "made")
    uri = store(tmp_path / "made", settings=settings)
    assert uri == f"file://{settings.home}/artifacts/checkpoints/{digest}"
    found = fetch(uri, settings=settings)
    assert found.digest == digest
    assert (found.path / "extra" / "config.json").read_text() == "{}"
    assert [path.name for path in found.path.parent.iterdir()] == [digest]


def test_a_folder_is_served_from_where_it_lies(tmp_path: Path, settings: Settings) -> None:
    digest = checkpoint(tmp_path / "made")
    found = fetch(str(tmp_path / "made"), settings=settings)
    assert (found.path, found.digest) == (tmp_path / "made", digest)


def test_storing_twice_keeps_the_first_copy(tmp_path: Path, settings: Settings) -> None:
    checkpoint(tmp_path / "made")
    uri = store(tmp_path / "made", settings=settings)
    file = fetch(uri, settings=settings).path / "model.safetensors"
    inode = file.stat().st_ino
    assert store(tmp_path / "made", settings=settings) == uri
    assert file.stat().st_ino == inode


@pytest.mark.parametrize("damage", [b"WEIGHTS", b"short", None])
def test_a_damaged_file_is_named(tmp_path: Path, settings: Settings, damage: bytes | None) -> None:
    checkpoint(tmp_path / "made")
    uri = store(tmp_path / "made", settings=settings)
    file = fetch(uri, settings=settings).path / "model.safetensors"
    file.unlink() if damage is None else file.write_bytes(damage)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        fetch(uri, settings=settings)
    with pytest.raises(CheckpointDamaged, match="remove"):
        store(tmp_path / "made", settings=settings)


def test_a_damaged_source_leaves_nothing_in_the_store(tmp_path: Path, settings: Settings) -> None:
    checkpoint(tmp_path / "made")
    (tmp_path / "made" / "model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(CheckpointDamaged):
        store(tmp_path / "made", settings=settings)
    assert not (settings.home / "artifacts").exists()


def test_alias_and_version_lead_to_the_checkpoint(tmp_path: Path, settings: Settings) -> None:
    digest = checkpoint(tmp_path / "made")
    uri = store(tmp_path / "made", settings=settings)
    registry = Registry(settings.mlflow_tracking_uri, home=settings.home)
    registry.register(RegisterRequest(name="tiny", digest=digest, uri=uri, verdict="passed"))
    for name in ("models:/tiny@candidate", "models:/tiny/1"):
        assert fetch(name, settings=settings).digest == digest


def test_a_registered_uri_with_other_bytes_is_refused(tmp_path: Path, settings: Settings) -> None:
    checkpoint(tmp_path / "made")
    uri = store(tmp_path / "made", settings=settings)
    registry = Registry(settings.mlflow_tracking_uri, home=settings.home)
    registry.register(RegisterRequest(name="tiny", digest="0" * 64, uri=uri, verdict="passed"))
    with pytest.raises(CheckpointDamaged, match="was registered with 000000000000"):
        fetch("models:/tiny/1", settings=settings)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("file://host/x", "three slashes"),
        ("s3://bucket/x", "not supported"),
        ("ftp:x", "unknown kind of URI"),
        (__file__, "is a file"),
    ],
)
def test_a_uri_that_leads_nowhere_is_one_clear_line(settings: Settings, uri: str, says: str) -> None:
    with pytest.raises(ArtifactError, match=says) as caught:
        fetch(uri, settings=settings)
    assert "\n" not in str(caught.value)


def test_an_s3_artifact_root_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoint(tmp_path / "made")
    settings = read_settings({"NG_HOME": str(tmp_path / "ng"), "NG_ARTIFACT_ROOT": "s3://bucket/x"})
    with pytest.raises(ArtifactError, match="s3"):
        store(tmp_path / "made", settings=settings)
    assert not (tmp_path / "ng").exists()


def test_two_processes_store_the_same_checkpoint_at_once(tmp_path: Path, settings: Settings) -> None:
    digest = checkpoint(tmp_path / "made", content=b"x" * 5_000_000)
    program = textwrap.dedent(f"""
        from pathlib import Path
        from narrowgauge.serving.artifacts import store
        from narrowgauge.serving.settings import read_settings
        print(store(Path({str(tmp_path / "made")!r}), settings=read_settings({{"NG_HOME": {str(settings.home)!r}}})))
    """)
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {child.communicate(timeout=60)[0].strip() for child in children}
    assert all(child.returncode == 0 for child in children)
    assert len(answers) == 1
    assert fetch(answers.pop(), settings=settings).digest == digest
    assert [path.name for path in (settings.home / "artifacts" / "checkpoints").iterdir()] == [digest]
