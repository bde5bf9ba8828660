"""NG_ variables: precedence, defaults, and what is refused."""

from pathlib import Path

import pytest

from narrowgauge.serving.settings import SettingsError, read_settings


def test_everything_defaults_below_the_state_folder(tmp_path):
    settings = read_settings({"XDG_STATE_HOME": str(tmp_path)})
    home = tmp_path / "narrowgauge"
    assert settings.home == home
    assert settings.artifact_root == f"file://{home}/artifacts"
    assert settings.store_url == f"sqlite:///{home}/rollouts.db"
    assert settings.admin_url == f"unix:{home}/run/controller.sock"
    assert settings.gateway_admin_url == f"unix:{home}/run/gateway.sock"
    assert not home.exists(), "reading settings must not create anything"


def test_our_tracking_variable_beats_mlflows_which_beats_the_default(tmp_path):
    env = {"NG_HOME": str(tmp_path)}
    assert read_settings(env).mlflow_tracking_uri == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    env["MLFLOW_TRACKING_URI"] = "http://mlflow:5000"
    assert read_settings(env).mlflow_tracking_uri == "http://mlflow:5000"
    env["NG_MLFLOW_TRACKING_URI"] = "sqlite:///x.db"
    assert read_settings(env).mlflow_tracking_uri == "sqlite:///x.db"


def test_a_relative_home_is_made_absolute_and_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_settings({"NG_HOME": "state"}).home == Path(tmp_path) / "state"
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"NG_HOME=.*is a file; it must name a folder"):
        read_settings({"NG_HOME": str(tmp_path / "file")})
