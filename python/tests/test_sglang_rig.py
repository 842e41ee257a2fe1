"""The tests under a real SGLang, without one: what their set-up refuses."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts")]

import sglang_setup  # noqa: E402
import vllm_setup  # noqa: E402


def test_set_up_refuses_another_python(tmp_path, monkeypatch):
    (tmp_path / "venv" / "lib" / "python3.12").mkdir(parents=True)
    with pytest.raises(vllm_setup.SetupError, match=r"has Python 3\.12"):
        sglang_setup.check_python(tmp_path)
    monkeypatch.setattr(sglang_setup.platform, "libc_ver", lambda: ("glibc", "2.31"))
    with pytest.raises(vllm_setup.SetupError, match=r"glibc 2\.34 or later, this is 2\.31"):
        sglang_setup.check_python(tmp_path)


def test_set_up_refuses_a_machine_without_headers(monkeypatch):
    monkeypatch.setattr(sglang_setup, "PROBE", "#include <no/such/header.h>\n")
    with pytest.raises(vllm_setup.SetupError, match="python3-dev"):
        sglang_setup.check_compiler(sys.executable)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(vllm_setup.SetupError, match="g\\+\\+"):
        sglang_setup.check_compiler(sys.executable)
