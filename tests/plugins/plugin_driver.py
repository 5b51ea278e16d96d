"""A process that does with our plugins what TensorRT does while it builds: prints what came of it as JSON.

Run as `python plugin_driver.py JOB`; JOB: {"sm", "options", "plugins": {name: {"types": {input: type}, "attributes",
"dims": {input: numbers or names}, "free": {name: number}}}}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import tensorrt_double as double


def build(trt: Any, creators: dict[str, Any], name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Create a plugin, ask it for all that a build needs, in TensorRT's order."""
    fields = [
        trt.PluginField(
            key,
            np.array([value], np.float32 if isinstance(value, float) else np.int32),
            trt.PluginFieldType.FLOAT32 if isinstance(value, float) else trt.PluginFieldType.INT32,
        )
        for key, value in job["attributes"].items()
    ]
    creator = creators[f"plansmith::{name}"]
    # A registry that was asked for by name, as the parser does.
    assert trt.get_plugin_registry().get_creator(name, "1", "plansmith") is not None
    plugin = creator.create_plugin(
        name,
        "plansmith",
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        double.QuickPluginCreationRequest.STRICT_AOT,
    ).clone()
    kinds = [getattr(trt.DataType, kind) for kind in job["types"].values()]
    dims = [job["dims"][name] for name in job["types"]]
    out_kinds = plugin.get_output_data_types(kinds, [len(one) for one in dims])
    builder = double.ExprBuilder()
    symbols = [
        [double.symbol(n) if isinstance(n, str) else double.IDimensionExpr(n) for n in one] for one in dims
    ]
    out_dims = plugin.get_output_shapes(symbols, [], builder)

    def described(kind: Any, one: Any) -> Any:
        return double.DynamicPluginTensorDesc(kind, [-1 if isinstance(n, str) else n for n in one])

    in_out = [described(*one) for one in zip(kinds, dims, strict=True)]
    in_out += [described(kind, ["free"] * len(one)) for kind, one in zip(out_kinds, out_dims, strict=True)]
    supported = plugin.get_supported_format_combinations(in_out, len(kinds))
    plugin.configure_plugin(in_out[: len(kinds)], in_out[len(kinds) :])
    found: dict[str, Any] = {
        "types": [kind.name for kind in out_kinds],
        "shapes": [[one.at(job["free"]) for one in dims] for dims in out_dims],
        "aliases": [plugin.get_aliased_input(n) for n in range(len(out_kinds))],
        "supported": [[one.type.name, one.format.name] for one in supported],
    }
    assert plugin.get_valid_tactics() == []  # nothing to choose: TensorRT then gives the default
    plugin.set_tactic(0)
    return found | launch(plugin, symbols, in_out, len(kinds), builder, job)


def launch(
    plugin: Any, symbols: Any, in_out: Any, count: int, builder: Any, job: dict[str, Any]
) -> dict[str, Any]:
    """Return what is launched, evaluated at the job's free dimensions."""
    from types import SimpleNamespace

    params, setter = SimpleNamespace(), double.SymExprSetter()
    plugin.get_launch_params(symbols, in_out, count, params, setter, builder)
    one = [desc.desc for desc in in_out]
    name, ptx = plugin.get_kernel(one[:count], one[count:])
    assert all(number.dtype.name == "INT32" and number.type.name == "INT" for number in setter)
    return {
        "grid": [getattr(params, f"grid_{axis}").expr.at(job["free"]) for axis in "xyz"],
        "block": [getattr(params, f"block_{axis}").expr.at(job["free"]) for axis in "xyz"],
        "shared_bytes": params.shared_mem.expr.at(job["free"]),
        "numbers": [number.expr.at(job["free"]) for number in setter],
        "symbol": name,
        "ptx": ptx.decode(),
    }


def main() -> None:
    """Register for the job's GPU, then build every plugin of the job."""
    job = json.loads(sys.argv[1])
    trt, trtp = double.load()
    from plansmith.plugins.paged_attention.plugin import register_plugins

    register_plugins(trt, trtp, job["sm"], **job.get("options", {}))
    from tensorrt.plugin._lib import QDP_CREATORS  # type: ignore[import-not-found]

    print(json.dumps({name: build(trt, QDP_CREATORS, name, one) for name, one in job["plugins"].items()}))


if __name__ == "__main__":
    main()
