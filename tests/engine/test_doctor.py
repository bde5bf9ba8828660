"""The doctor's findings."""

from pathlib import Path

from narrowgauge.engine.doctor import run_checks


def test_a_sound_machine_passes_and_every_runnable_kernel_is_compared(tmp_path: Path) -> None:
    checks = run_checks(tmp_path / "home")
    assert [check for check in checks if check.status == "fail"] == []
    by_name = {check.name: check for check in checks}
    assert "differs from its twin" in by_name["kernel int4_gemm"].detail
    assert {"torch", "dtype", "kernels", "memory", "disk", "C++ compiler", "kernel rms_norm"} <= set(by_name)


def test_a_home_that_cannot_be_written_fails_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = [check for check in run_checks(tmp_path / "file" / "home") if check.name == "NG_HOME"]
    assert [check.status for check in found] == ["fail"]
    assert "set NG_HOME" in found[0].detail
