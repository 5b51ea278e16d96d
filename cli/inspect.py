"""`plansmith inspect`: what an engine directory holds."""

from __future__ import annotations

import collections
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._output import print_json, size_text

if TYPE_CHECKING:
    from ..builder.targets.cpu.plan_file import Op
    from ..runtime.executors.kernel_bundle import BundleEntry
    from ..runtime.manifest import Manifest
    from ..runtime.manifest_entries import TargetEntry


def inspect(
    engine_dir: Annotated[Path, typer.Argument(help="An engine directory.")],
    check_hashes: Annotated[
        bool, typer.Option("--check-hashes", help="Read every file and compare its contents.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Also the cpu plan's operations and tensors.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--runs-on",
            metavar="GPU",
            help="Tell instead which targets run on a GPU, e.g. l40s or sm89 (cpu = without one), why others do not, "
            "and what to do. Several with commas. Exits with 1 where none does. See docs/portability.md.",
        ),
    ] = None,
    driver: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="With --runs-on: the NVIDIA driver there, e.g. 580.65."),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME=VERSION",
            help="With --runs-on: the library there, e.g. tensorrt_rtx=1.8.0; default: the one that a plan asks for.",
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(metavar="SYSTEM", help="With --runs-on: the platform there, e.g. linux-aarch64."),
    ] = None,
    upgrade: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VERSION",
            help="Tell instead what has to be built again after an upgrade, e.g. tensorrt_rtx=1.8.0,driver=590.44.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what an engine directory holds, after checking that its files are whole."""
    from ..runtime.errors import InvalidArgumentError
    from ..runtime.manifest import load_manifest
    from ..runtime.manifest_fields import to_json

    _check_options(where, driver, with_, platform)
    if plan and (where or upgrade):
        raise InvalidArgumentError(
            "--plan shows a plan, --runs-on and --upgrade tell about all; give one of them"
        )
    manifest = load_manifest(engine_dir)
    manifest.check_files(hashes=check_hashes)
    if where or upgrade:
        _tell_portability(manifest, where or [], (driver, with_ or [], platform), upgrade or [], as_json)
        return
    report = _read_report(engine_dir)
    operations = _plan_summary(manifest) if plan else None
    if as_json:
        content = {
            "manifest": to_json(manifest),
            "build_report": report,
            "kv_cache": _kv(manifest),
            "kernels": {name: to_json(one) for name, one in _kernels(manifest).items()},
        }
        print_json(content if operations is None else {**content, "plan": operations})
        return
    _print_head(manifest)
    _print_targets(manifest, report)
    if operations is not None:
        _print_plan(operations)
    checked = "contents checked" if check_hashes else "sizes checked; contents with --check-hashes"
    print(f"files are whole ({checked})")


def _check_options(
    where: list[str] | None, driver: str | None, with_: list[str] | None, platform: str | None
) -> None:
    """Raise InvalidArgumentError for a machine that nothing is asked about, and a question about none."""
    from ..runtime.errors import InvalidArgumentError
    from ._portability import words_of

    given = [
        flag for flag, value in (("--driver", driver), ("--with", with_), ("--platform", platform)) if value
    ]
    if given and not where:
        raise InvalidArgumentError(
            f"{given[0]} describes the machine of --runs-on, which is not given; add e.g. --runs-on l40s"
        )
    if where is not None and where and not words_of(where):
        raise InvalidArgumentError("--runs-on is empty; name a GPU, e.g. --runs-on l40s")


def _tell_portability(
    manifest: Manifest,
    where: list[str],
    there: tuple[str | None, list[str], str | None],
    upgrade: list[str],
    as_json: bool,
) -> None:
    """Print what --runs-on and --upgrade ask for; exit with 1 where no target runs."""
    from . import _portability as portability
    from . import _portability_text as text

    content: dict[str, Any] = {}
    if where:
        content["runs_on"] = portability.where_it_runs(
            manifest, portability.words_of(where), portability.machine(*there), _kernels(manifest)
        )
    if upgrade:
        content["upgrade"] = portability.after_upgrade(manifest, upgrade)
    if as_json:
        print_json(content)
    else:
        text.print_places(content.get("runs_on", {}))
        if upgrade:
            text.print_upgrade(content["upgrade"])
    refusal = text.refusal(manifest, content.get("runs_on", {}))
    if refusal is not None:
        print(f"plansmith: {refusal}", file=sys.stderr)
        raise typer.Exit(1)


def _read_report(engine_dir: Path) -> dict[str, Any]:
    """Return build_report.json's targets; {} when it is absent, for it is no part of the engine."""
    from ..builder.build_report import read_targets

    return {name: dataclasses.asdict(one) for name, one in read_targets(engine_dir).items()}


def _kv(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return, a target, the bytes of KV cache: of a token, of a block, and for all sequences at full length."""
    limits = manifest.limits
    result = {}
    for name, target in manifest.targets.items():
        token = manifest.model.kv_bytes_per_token(target.kv_dtype)
        blocks = -(-limits.max_seq_len // limits.tokens_per_block) * limits.max_batch_size
        block = token * limits.tokens_per_block
        result[name] = {"bytes_per_token": token, "bytes_per_block": block, "bytes_at_limits": block * blocks}
    return result


def _kernels(manifest: Manifest) -> dict[str, BundleEntry]:
    """Return the device kernels of the targets that have some."""
    from ..runtime.executors.kernel_bundle import read_bundle

    folders = {name: manifest.kernels_dir(name) for name in manifest.targets}
    return {name: read_bundle(folder) for name, folder in folders.items() if folder is not None}


def _print_head(manifest: Manifest) -> None:
    from rich.console import Console
    from rich.table import Table

    model, limits = manifest.model, manifest.limits
    windows = sorted({window for window in model.windows if window})
    rows = {
        "model": f"{model.architecture} ({model.family}), {model.num_parameters / 1e6:.1f} million parameters",
        "shape": f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads "
        f"({model.num_kv_heads} KV) of {model.head_dim}, vocabulary {model.vocab_size}"
        + (f", windows {', '.join(map(str, windows))}" if windows else ""),
        "precision": manifest.precision,
        "draft": "none" if manifest.draft is None else f"{manifest.draft.precision}, drafts for this one",
        "limits": f"batch {limits.max_batch_size}, tokens a step {limits.max_num_tokens}, prompt "
        f"{limits.max_input_len}, sequence {limits.max_seq_len}, block {limits.tokens_per_block}",
        "tokenizer": f"{len(manifest.tokenizer.files)} files, sha256 {manifest.tokenizer.sha256[:16]}…",
        "checkpoint": f"{manifest.checkpoint.path}, {manifest.checkpoint.fingerprint[:16]}…",
        "built": f"{manifest.created} by plansmith {manifest.plansmith_version} on {manifest.host.cpu} "
        f"({manifest.host.cpus} CPUs), {manifest.host.os}",
    }
    table = Table(title=str(manifest.root), title_justify="left", show_header=False)
    for name, text in rows.items():
        table.add_row(name, text)
    Console().print(table)


def _print_targets(manifest: Manifest, report: dict[str, Any]) -> None:
    """Print one column a target."""
    from rich.console import Console
    from rich.table import Table

    facts = {name: _target_facts(manifest, name, report.get(name, {})) for name in manifest.targets}
    table = Table()
    table.add_column("target")
    for name in facts:
        table.add_column(name)
    for row in next(iter(facts.values()), {}):
        table.add_row(row, *(one[row] for one in facts.values()))
    Console().print(table)


def _target_facts(manifest: Manifest, name: str, report: dict[str, Any]) -> dict[str, str]:
    target, kv = manifest.targets[name], _kv(manifest)[name]
    quantized = target.activation_quantization
    weights = report.get("weight_bytes", {})
    rounded = f", {quantized} in products" if quantized != "none" else ""
    return {
        "compiler": f"{target.compiler} {target.compiler_version}",
        "runs on": " ".join(target.sm) or "any CPU",
        "steps": target.token_layout,
        "activations": f"{target.compute_dtype}{rounded}",
        "plan": size_text(sum(file.size for file in target.plan_files())),
        "device kernels": _kernel_fact(manifest, name),
        "draft": _draft_fact(manifest, name),
        "weights": "\n".join(f"{kind} {size_text(size)}" for kind, size in weights.items()),
        "group size": _group_fact(manifest.precision, target, report),
        "KV pools": f"{target.kv_dtype}, {size_text(kv['bytes_per_token'])} a token",
        "KV at limits": size_text(kv["bytes_at_limits"]),
        "compiled in": f"{target.seconds:.1f} s",
        "built": _origin_fact(target),
        "with": _tools_fact(target),
        "peak memory": size_text(report["peak_rss_bytes"]) if report.get("peak_rss_bytes") else "",
        "key": f"{target.key[:16]}…",
    }


def _origin_fact(target: TargetEntry) -> str:
    """Return when, by what and where a plan was compiled, which may be elsewhere than the directory's other plans."""
    own = target.provenance
    if own is None:
        return "not noted"
    gpus = "".join(f"\n{name}" for name in own.gpus)
    return f"{own.created}\nplansmith {own.plansmith_version}\n{own.platform}, {own.host.cpu}{gpus}"


def _tools_fact(target: TargetEntry) -> str:
    """Return the versions of what took part in a plan."""
    return "" if target.provenance is None else "\n".join(target.provenance.tools)


def _group_fact(precision: str, target: TargetEntry, report: dict[str, Any]) -> str:
    """Return what shares a scale of a target's quantized weights; "" where they have none, or nobody can tell."""
    from ..builder.precision import PRECISIONS

    recipe = PRECISIONS.get(precision)
    if recipe is None:  # a quantized checkpoint's own, of which the manifest has the name alone
        return str(report.get("group_size", ""))
    recipe = dataclasses.replace(recipe, group_size=target.group_size)
    return (recipe if target.sm else recipe.on_cpu()).weight_groups


def _kernel_fact(manifest: Manifest, name: str) -> str:
    """Return what a target has to draw tokens with on the device."""
    target = manifest.targets[name]
    if not target.sm:
        return ""
    bundle = _kernels(manifest).get(name)
    if bundle is None:
        return "none: tokens are drawn\non the host"
    total = size_text(sum(file.size for file in target.kernel_files()))
    return f"{len(bundle.kernels)}, {total}\ntriton {bundle.triton_version}"


def _draft_fact(manifest: Manifest, name: str) -> str:
    """Return the size of a target's draft, and of its KV cache, which comes on top of the target's."""
    own = None if manifest.draft is None else manifest.draft.targets.get(name)
    if manifest.draft is None or own is None:
        return "none"
    token = manifest.model.kv_bytes_per_token(own.kv_dtype)
    plan = size_text(sum(file.size for file in own.files))
    groups = _group_fact(manifest.draft.precision, own, {})
    held = f"{plan}, a scale for {groups}" if groups else plan
    return f"{held}\nKV {own.kv_dtype}, {size_text(token)} a token"


def _plan_summary(manifest: Manifest) -> dict[str, Any]:
    """Return the cpu plan's operations and tensors, from its tables alone."""
    from ..builder.targets.cpu import read_plan

    plan = read_plan(manifest.plan_path("cpu"))
    return {
        "kv_format": plan.kv_format.name.lower(),
        "ops": [_op_facts(op) for op in plan.ops],
        "tensors": [
            {
                "name": one.name,
                "dtype": one.dtype.name.lower(),
                "layout": one.layout.name.lower(),
                "shape": [one.rows, one.cols],
                "group_size": one.group_size,
                "zero_points": one.zeros.size > 0,
            }
            for one in plan.tensors
        ],
        "slots": [{"rows": slot.rows.name.lower(), "width": slot.width} for slot in plan.slots],
    }


def _op_facts(op: Op) -> dict[str, Any]:
    """Return an operation, with what a product takes its input as and what an input is rounded to."""
    from ..builder.targets.cpu.plan_file import LinearInput, OpCode, RoundFormat

    tensors = [t for t in op.tensors if t >= 0]
    facts: dict[str, Any] = {"name": op.name, "op": op.code.name.lower(), "tensors": tensors}
    if op.code is OpCode.LINEAR:
        facts["input"] = LinearInput(op.i[1]).name.lower()
    if op.code is OpCode.ROUND_INPUT:
        facts["rounds_to"], facts["group_size"] = RoundFormat(op.i[1]).name.lower(), op.i[2]
    return facts


def _print_plan(plan: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    counts = collections.Counter(op["op"] for op in plan["ops"])
    print(
        f"cpu plan: {len(plan['ops'])} operations: "
        + ", ".join(f"{n} {op}" for op, n in counts.most_common())
    )
    inputs = collections.Counter(op["input"] for op in plan["ops"] if "input" in op)
    rounded = collections.Counter(op["rounds_to"] for op in plan["ops"] if "rounds_to" in op)
    print(
        "products take their inputs as "
        + ", ".join(f"{name} ({n})" for name, n in inputs.most_common())
        + "".join(f"; {n} inputs are rounded to {name} before" for name, n in rounded.most_common())
        + f"; KV pools hold {plan['kv_format']}"
    )
    widths = ", ".join(f"{slot['width']} ({slot['rows']})" for slot in plan["slots"])
    print(f"buffers, float32 columns: {widths}")
    table = Table(title="tensors of the plan", title_justify="left")
    for column in ("#", "tensor", "type", "layout", "shape", "group"):
        table.add_column(column)
    for n, one in enumerate(plan["tensors"]):
        shape = " x ".join(map(str, one["shape"]))
        group = str(one["group_size"] or "")
        kind = one["dtype"] + (", zero points" if one["zero_points"] else "")
        table.add_row(str(n), one["name"], kind, one["layout"], shape, group)
    Console().print(table)
