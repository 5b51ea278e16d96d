"""Finding a tritonserver: what is refused, with what to do, and what the links look like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from plansmith.serving.supervisor.install import TritonInstall
from triton_servers import find_install


def _environment(folder: Path) -> Path:
    """Make a bare virtual environment, quickly."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def _put(environment: Path, name: str) -> Path:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    path = environment / "lib" / f"python{version}" / "site-packages" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_the_wheel_is_found_and_linked(tmp_path: Path) -> None:
    install = find_install()
    backends = install.link_backends(tmp_path / "backends")
    install.link_backends(tmp_path / "backends")  # again is fine
    stub = backends / "python" / "triton_python_backend_stub"
    assert stub.resolve() == install.stub.resolve()
    assert (backends / "python" / "libtriton_python.so").exists()
    assert install.import_failure("plansmith.serving.supervisor.install", backends) == ""
    assert "nothing_of_that_name" in install.import_failure("nothing_of_that_name", backends)
    assert "http-port" in install.options()


def test_an_environment_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no virtual environment.*make triton-env"):
        TritonInstall.find(tmp_path)
    with pytest.raises(InvalidArgumentError, match="no program that can be run"):
        TritonInstall.find(None, tmp_path / "tritonserver")


def test_an_environment_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no nvidia-pytriton and there is no /opt/tritonserver"):
        TritonInstall.find(_environment(tmp_path / "env"))


def test_numpy_2_is_refused_for_a_stub_that_crashes_with_it(tmp_path: Path) -> None:
    real = find_install()
    environment = _environment(tmp_path / "env")
    _put(environment, "pytriton").mkdir()
    _put(environment, "pytriton/tritonserver").symlink_to(real.tritonserver.parent.parent)
    with pytest.raises(UnsupportedError, match="has no numpy"):
        TritonInstall.find(environment)
    _put(environment, "numpy-2.1.0.dist-info/METADATA").write_text("Name: numpy\nVersion: 2.1.0\n")
    with pytest.raises(UnsupportedError, match=r"crashes with numpy 2.*numpy 2\.1\.0.*'numpy<2'"):
        TritonInstall.find(environment)


def test_a_server_of_an_image_needs_a_python_of_its_stubs_version(tmp_path: Path) -> None:
    program = tmp_path / "opt" / "bin" / "tritonserver"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(UnsupportedError, match="has no Python backend"):
        TritonInstall.find(None, program)
    stub = tmp_path / "opt" / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    (stub.parent.parent / "identity").mkdir()
    stub.write_bytes(b"\x7fELF libpython3.8.so.1.0")
    with pytest.raises(UnsupportedError, match=r"runs Python 3\.8, but"):
        TritonInstall.find(None, program)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub.write_bytes(f"\x7fELF libpython{version}.so.1.0".encode())
    install = TritonInstall.find(None, program)
    backends = install.link_backends(tmp_path / "backends")
    assert (backends / "identity").is_dir()
    assert install.environ(os.environ)["PATH"].startswith(str(install.python.parent))
