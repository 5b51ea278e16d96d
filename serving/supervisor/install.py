"""Where a tritonserver is, and the Python that its models run in: a wheel's, NVIDIA's image, or an explicit path."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...runtime.errors import InvalidArgumentError, UnsupportedError

IMAGE = Path("/opt/tritonserver/bin/tritonserver")  # in NVIDIA's container image
ENVIRONMENT_VARIABLE = "PLANSMITH_TRITON_ENV"
_OWN_PACKAGE = Path(__file__).absolute().parents[2]
_PROBE = """
import ctypes, importlib.metadata, importlib.util, json, os, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
try:
    numpy = importlib.metadata.version("numpy")
except importlib.metadata.PackageNotFoundError:
    numpy = ""
name = "libpython%s.so.1.0" % version
folder = sysconfig.get_config_var("LIBDIR") or ""
def loads(path):
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True
beside = os.path.join(folder, name)
print(json.dumps({"version": version, "numpy": numpy, "libpython": name,
                  "folder": folder if os.path.exists(beside) else "", "loads": loads(name)}))
"""


@dataclasses.dataclass(frozen=True)
class TritonInstall:
    """A tritonserver that can run Python models. Made by `find`, which has checked it.

    tritonserver : the program
    python_backend : folder of libtriton_python.so and triton_python_backend_utils.py
    stub : the program that runs a model's Python
    caches : --cache-directory, or None for the server's own default
    other_backends : folder whose other backends are offered too, or None
    python : the interpreter whose packages the models see
    library_dir : where libpython is when the loader does not find it by itself, or the interpreter's own; or None
    """

    tritonserver: Path
    python_backend: Path
    stub: Path
    caches: Path | None
    other_backends: Path | None
    python: Path
    library_dir: Path | None

    @classmethod
    def find(cls, environment: Path | None = None, tritonserver: Path | None = None) -> TritonInstall:
        """Return the server to run.

        environment : a virtual environment with nvidia-pytriton, whose Python the models run in. Default:
            $PLANSMITH_TRITON_ENV, else the running environment. With NVIDIA's image it may be one without
            nvidia-pytriton, which then gives the Python alone.
        tritonserver : the program, instead of the environment's or the image's
        raises : UnsupportedError when there is none, or it cannot run models here; InvalidArgumentError for a
            path that is not what it should be
        """
        named = environment or _environment_variable()
        if named is not None and not (named / "bin" / "python3").exists():
            raise InvalidArgumentError(
                f"{named} is no virtual environment: it has no bin/python3; "
                "make one with `make triton-env`, or name another"
            )
        python = _interpreter(named)
        if tritonserver is not None:
            found = _beside(tritonserver, python)
        else:
            wheel = _wheel(named)
            found = _of_wheel(wheel, python) if wheel is not None else _of_image(python, named)
        return found

    def link_backends(self, folder: Path) -> Path:
        """Make `folder` the server's --backend-directory, of links, and return it.

        The programs find their libraries relative to where they really are, so links work and copies do not.
        The folder of the Python backend ends the models' sys.path, which PYTHONPATH has no part in. So this
        plansmith is linked there, for environments that have none of their own.
        """
        python = folder / "python"
        python.mkdir(parents=True, exist_ok=True)
        links = {python / name.name: name for name in self.python_backend.iterdir() if name.is_file()}
        links[python / self.stub.name] = self.stub
        links[python / "plansmith"] = _OWN_PACKAGE
        if self.other_backends is not None:
            for backend in self.other_backends.iterdir():
                if backend.name != "python":
                    links[folder / backend.name] = backend
        for link, target in links.items():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        return folder

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` changed so that stubs find this Python: they ask `python3` on PATH for its packages."""
        result = dict(base)
        result["PATH"] = f"{self.python.parent}{os.pathsep}{base.get('PATH', os.defpath)}"
        result.pop("PYTHONHOME", None)
        result.pop("VIRTUAL_ENV", None)
        if self.library_dir is not None:
            earlier = base.get("LD_LIBRARY_PATH")
            result["LD_LIBRARY_PATH"] = f"{self.library_dir}{os.pathsep + earlier if earlier else ''}"
        return result

    def options(self) -> frozenset[str]:
        """Return the names of the program's options, for those that only newer servers have."""
        try:
            shown = subprocess.run(
                [self.tritonserver, "--help"], capture_output=True, text=True, timeout=60, check=False
            )
        except subprocess.TimeoutExpired:
            return frozenset()
        return frozenset(re.findall(r"--([a-z0-9-]+)", shown.stdout + shown.stderr))

    def compile_models(self, repositories: Iterable[Path]) -> None:
        """Write the models' __pycache__ now, where it can be written.

        A stub would write it when it loads a model, in the model's folder, where it looks like a change: loading
        an ensemble after that would load the models of its steps a second time.
        """
        files = [str(file) for one in repositories for file in one.glob("*/*/*.py")]
        if files:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [self.python, "-m", "compileall", "-q", *files],
                    capture_output=True,
                    timeout=120,
                    check=False,
                )

    def import_failure(self, module: str, backends: Path) -> str:
        """Return "" when models will be able to import `module`, else the last line of what Python says.

        backends : folder of `link_backends`
        """
        program = f"import sys; sys.path.append({str(backends / 'python')!r}); import {module}"
        try:
            done = subprocess.run(
                [self.python, "-I", "-c", program], capture_output=True, text=True, timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            return "it takes longer than two minutes"
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def has_server(environment: Path | None = None) -> bool:
    """Return whether `find` would look at a tritonserver here: an environment's, or the image's; nothing is run."""
    return _wheel(environment or _environment_variable()) is not None or IMAGE.exists()


def _environment_variable() -> Path | None:
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return Path(text).absolute() if text else None


def _interpreter(environment: Path | None) -> Path:
    """Return the interpreter that stubs will find first; its links are kept, for they lead to the packages."""
    if environment is not None:
        return environment.absolute() / "bin" / "python3"
    beside = Path(sys.executable).parent / "python3"
    return beside if beside.exists() else Path(shutil.which("python3") or sys.executable)


def _wheel(environment: Path | None) -> Path | None:
    """Return the folder `pytriton/tritonserver` of an environment, or None."""
    root = environment.absolute() if environment is not None else Path(sys.prefix)
    places = sorted(root.glob("lib/python3.*/site-packages/pytriton/tritonserver"))
    return next((place for place in places if (place / "bin" / "tritonserver").exists()), None)


def _of_wheel(folder: Path, python: Path) -> TritonInstall:
    probe = _probe(python)
    version = str(probe["version"])
    stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(one.name for one in (folder / "python_backend_stubs").iterdir()))
        raise UnsupportedError(
            f"nvidia-pytriton in {folder} has no stub for Python {version}, it has them for {known}; "
            "make the environment with one of these"
        )
    _check_numpy(stub, python, str(probe["numpy"]))
    return TritonInstall(
        tritonserver=folder / "bin" / "tritonserver",
        python_backend=folder / "backends" / "python",
        stub=stub,
        caches=folder / "caches",
        other_backends=None,
        python=python,
        library_dir=_library_dir(probe, python),
    )


def _of_image(python: Path, environment: Path | None) -> TritonInstall:
    if not IMAGE.exists():
        where = environment or Path(sys.prefix)
        raise UnsupportedError(
            f"no tritonserver: {where} has no nvidia-pytriton and there is no {IMAGE}; run `make triton-env` and "
            f"name the environment with --triton-env or {ENVIRONMENT_VARIABLE}, or work in NVIDIA's image, or give "
            "--tritonserver"
        )
    return _beside(IMAGE, python)


def _beside(tritonserver: Path, python: Path) -> TritonInstall:
    """Return the installation that a program belongs to: <root>/bin/tritonserver, <root>/backends."""
    program = tritonserver.absolute()
    if not os.access(program, os.X_OK) or program.is_dir():
        raise InvalidArgumentError(f"{program} is no program that can be run; give the path of tritonserver")
    root = program.resolve().parent.parent
    if (root / "python_backend_stubs").is_dir():
        return _of_wheel(root, python)
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        raise UnsupportedError(
            f"{program} has no Python backend: there is no {stub}; take an image whose name ends in -py3"
        )
    probe = _probe(python)
    wanted = _stub_version(stub)
    if wanted and wanted != probe["version"]:
        raise UnsupportedError(
            f"the stub {stub} runs Python {wanted}, but {python} is Python {probe['version']}; "
            f"give --triton-env an environment of Python {wanted} that has plansmith"
        )
    caches = root / "caches"
    return TritonInstall(
        tritonserver=program,
        python_backend=stub.parent,
        stub=stub,
        caches=caches if caches.is_dir() else None,
        other_backends=root / "backends",
        python=python,
        library_dir=_library_dir(probe, python),
    )


def _probe(python: Path) -> dict[str, object]:
    """Return what the interpreter says about itself."""
    environ = {name: text for name, text in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"{python} does not run ({error}); make the environment anew") from None
    if done.returncode != 0:
        raise UnsupportedError(
            f"{python} does not run: {done.stderr.strip()[-200:]}; make the environment anew"
        )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _library_dir(probe: Mapping[str, object], python: Path) -> Path | None:
    """Return where the stub's libpython is, the interpreter's own first, so that both are of one version."""
    folder = Path(str(probe["folder"]))
    of_system = folder.is_relative_to("/usr/lib") or folder.is_relative_to("/lib")
    if probe["folder"] and not of_system:
        return folder
    if probe["loads"] or probe["folder"]:
        return None
    package = str(probe["libpython"]).partition(".so")[0]
    raise UnsupportedError(
        f"the stub needs the shared library {probe['libpython']}, which neither {python} nor the system has; "
        f"install it, e.g. apt-get install {package}"
    )


def _check_numpy(stub: Path, python: Path, version: str) -> None:
    """Refuse numpy 2 for a stub that was compiled before it: it would crash on the first request."""
    if not version:
        raise UnsupportedError(f"{python} has no numpy; run: {python} -m pip install 'numpy<2'")
    if int(version.partition(".")[0]) >= 2 and b"numpy._core" not in stub.read_bytes():
        raise UnsupportedError(
            f"this tritonserver's Python stub crashes with numpy 2, and {python} has numpy {version}; run "
            f"{python} -m pip install 'numpy<2', or make an environment of its own with `make triton-env`"
        )


def _stub_version(stub: Path) -> str:
    """Return the Python that a stub was linked with, "3.12" say; "" when its file does not tell."""
    found = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return found.group(1).decode() if found else ""
