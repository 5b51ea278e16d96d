"""`plansmith triton`: a tritonserver started, watched over, stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._output import print_json

if TYPE_CHECKING:
    from ..serving.supervisor.state import State

Repository = Annotated[Path, typer.Argument(help="A model repository, as `plansmith triton-repo` writes it.")]
StateDir = Annotated[
    Path | None,
    typer.Option(help="Where state and logs are; default: REPOSITORY.run beside the repository."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]


def start(
    repository: Repository,
    state_dir: StateDir = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Load this model, and those of its steps; again for more. Default: all."),
    ] = None,
    triton_env: Annotated[
        Path | None,
        typer.Option(
            help="The virtual environment that has nvidia-pytriton, or whose Python the models run in; default: "
            "$PLANSMITH_TRITON_ENV, else the running one."
        ),
    ] = None,
    tritonserver: Annotated[
        Path | None, typer.Option(help="The program, instead of the environment's or /opt/tritonserver's.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8002,
    foreground: Annotated[
        bool,
        typer.Option("--foreground", help="Stay, log to standard error, drain at SIGTERM: for containers."),
    ] = False,
    exit_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that running requests have to end when it stops.")
    ] = 30,
    load_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one model may take to load.")
    ] = 600.0,
    canary: Annotated[
        list[str] | None,
        typer.Option(
            help='MODEL={"INPUT": value}: try this model with it. Engines and text models are tried with one '
            "token anyway."
        ),
    ] = None,
    canary_interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two tries of a model.")
    ] = 10.0,
    canary_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one try waits.")] = 10.0,
    hang_after: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds of silence, with no other request moving, after which a model or the server is ended "
            "and started anew.",
        ),
    ] = 60.0,
    on_dead_model: Annotated[
        str,
        typer.Option(
            help="When a model's process dies: `reload` it, where its running streams hang until their clients "
            "give up, or `restart` the server, where all connections end at once."
        ),
    ] = "reload",
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Restarts of the server within 10 minutes before it gives up with status 1."
        ),
    ] = 5,
    max_request_bytes: Annotated[
        int,
        typer.Option(
            min=1, help="Largest HTTP body, where the server has that limit (--http-max-input-size)."
        ),
    ] = 256 << 20,
    log_bytes: Annotated[
        int, typer.Option(min=4096, help="Size at which a log is put aside; 3 are kept.")
    ] = 64 << 20,
    server_arg: Annotated[
        list[str] | None,
        typer.Option(help="An option for tritonserver as it is, e.g. --server-arg=--log-verbose=1."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a tritonserver over a model repository, and a supervisor that keeps it alive.

    Returns when every model is loaded. The supervisor then tries the models with one-token requests, loads a model
    again whose process died, hangs or answers with errors only, and starts the server again when it is gone or
    silent. Environment variables reach the models.
    """
    from ..runtime.errors import InvalidArgumentError
    from ..serving.supervisor.__main__ import supervise
    from ..serving.supervisor.control import start_daemon
    from ..serving.supervisor.options import SupervisorOptions, read_canaries

    if on_dead_model not in ("reload", "restart"):
        raise InvalidArgumentError(f"--on-dead-model is {on_dead_model!r}; give reload or restart")
    options = SupervisorOptions(
        repositories=(repository.absolute(),),
        state_dir=_state_dir(repository, state_dir),
        models=tuple(model or ()),
        environment=triton_env.absolute() if triton_env is not None else None,
        tritonserver=tritonserver.absolute() if tritonserver is not None else None,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        exit_timeout_s=exit_timeout,
        load_timeout_s=load_timeout,
        canary_interval_s=canary_interval,
        canary_timeout_s=canary_timeout,
        hang_s=hang_after,
        restart_on_dead_stub=on_dead_model == "restart",
        max_restarts=max_restarts,
        canaries=read_canaries(tuple(canary or ())),
        max_request_bytes=max_request_bytes,
        log_bytes=log_bytes,
        arguments=tuple(server_arg or ()),
        is_foreground=foreground,
    )
    if foreground:
        raise typer.Exit(supervise(options))
    state = start_daemon(options, lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(_as_json(state))


def stop(
    repository: Repository,
    state_dir: StateDir = None,
    force: Annotated[bool, typer.Option("--force", help="Do not wait for running requests.")] = False,
    as_json: Json = False,
) -> None:
    """Let running requests finish, then stop the server and its supervisor; fine when none is running."""
    from ..serving.supervisor import control

    folder = _state_dir(repository, state_dir)
    _check_known(repository, folder)
    told = control.stop(folder, force)
    if as_json:
        print_json({"status": "stopped", "state_dir": str(folder), "message": told})
    else:
        typer.echo(told)


def status(repository: Repository, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Tell how a server is. Exit status: 0 all is well, 1 running but not well, 3 not running."""
    from ..serving.supervisor.control import verdict
    from ..serving.supervisor.state import read_state

    folder = _state_dir(repository, state_dir)
    state = read_state(folder)
    word, code = verdict(state)
    if as_json:
        known = _as_json(state) if state is not None else {"status": word}
        print_json({"state_dir": str(folder), **known})
    elif state is None:
        print(f"stopped: no server was ever started with {folder}")
    else:
        _print_state(word, state, folder)
    raise typer.Exit(code)


def _state_dir(repository: Path, given: Path | None) -> Path:
    from ..serving.supervisor.state import default_state_dir

    return given.absolute() if given is not None else default_state_dir(repository)


def _check_known(repository: Path, folder: Path) -> None:
    """Raise InvalidArgumentError for a path that is no repository and never had a server: mistyped, most likely."""
    from ..runtime.errors import InvalidArgumentError
    from ..serving.supervisor.state import read_state

    if read_state(folder) is None and not any(repository.glob("*/config.pbtxt")):
        raise InvalidArgumentError(
            f"{repository} is no model repository (it has no MODEL/config.pbtxt), and no server was ever started with "
            f"{folder}; give the path that `plansmith triton start` had"
        )


def _as_json(state: State) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(state), "status": _verdict(state)}


def _verdict(state: State) -> str:
    from ..serving.supervisor.control import verdict

    return verdict(state)[0]


def _print_state(word: str, state: State, folder: Path) -> None:
    print(f"{word}: {state.message}")
    if not state.server_pid:
        print(f"  logs in {folder}")
        return
    print(f"  HTTP {state.host}:{state.http_port}, gRPC {state.host}:{state.grpc_port}, ", end="")
    print(f"metrics http://{state.host}:{state.metrics_port}/metrics")
    print(f"  supervisor pid {state.supervisor_pid}, tritonserver pid {state.server_pid or 'none'}, ", end="")
    print(f"{state.restarts} restarts, {state.heals} models healed")
    for name, model in state.models.items():
        ready = "ready" if model["ready"] else f"not ready ({model['reason'] or 'no server'})"
        print(f"  {name}: {ready}{_canary_text(model['canary'])}")
    print(f"  logs in {folder}")


def _canary_text(canary: dict[str, Any] | None) -> str:
    if canary is None:
        return ""
    age_s = max(0.0, time.time() - canary["at"])
    error = f": {canary['error']}" if canary["error"] else ""
    return f", {canary['outcome']} {age_s:.0f} s ago in {canary['latency_ms']:.0f} ms{error}"
