"""What the machine refuses is one line that names the place; a bug keeps its trace."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

import narrowgauge
from narrowgauge.cli.environment import explained

RUN = (sys.executable, "-m", "narrowgauge")


def run(*arguments, home):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NG_")}
    environment["NG_HOME"] = str(home)
    return subprocess.run([*RUN, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", [["list"], ["gateway", "--port", "0"], ["controller", "--once"], ["demo"]])
def test_a_home_that_cannot_be_made_is_one_line(command):
    done = run(*command, home="/proc/ng")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: /proc/ng: cannot be made")
    assert "NG_HOME" in done.stderr


@pytest.mark.parametrize("command", [["list"], ["gateway", "--port", "0"], ["controller", "--once"]])
def test_a_home_below_a_file_is_one_line(command, tmp_path):
    (tmp_path / "file").write_text("")
    done = run(*command, home=tmp_path / "file" / "home")
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not do that"),
        (errno.EPERM, "may not do that"),
        (errno.ENOTDIR, "a file where a folder should be"),
        (errno.ENAMETOOLONG, "too long"),
    ],
)
def test_each_refusal_of_the_system_says_what_it_means_and_where(number, says):
    text = explained(OSError(number, os.strerror(number), "/data/model.safetensors"))
    assert text.startswith("/data/model.safetensors: ")
    assert says in text
    assert "\n" not in text


def test_safetensors_errors_of_the_same_causes_are_explained_too(tmp_path):
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "the disk is full" in explained(full)
    assert explained(SafetensorError("Error while deserializing header: header too small")) is None
    (tmp_path / "file").write_text("")
    with pytest.raises((SafetensorError, OSError)) as refused:
        save_file({"a": np.zeros(4)}, str(tmp_path / "file" / "a.safetensors"))
    assert "a file where a folder should be" in explained(refused.value)


def test_other_errors_stay_bugs(tmp_path, monkeypatch):
    monkeypatch.setenv("NG_HOME", str(tmp_path / "home"))
    assert explained(FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "missing"))) is None
    assert explained(OSError(errno.EIO, "Input/output error", "/x")) is None
    assert explained(ValueError("x")) is None


def test_the_version_is_told():
    done = subprocess.run([*RUN, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"narrowgauge {narrowgauge.__version__}\n")
