"""A tensorrt package that compiles nothing: for the child process of the tests.

Its classes have what TensorRT-RTX's classes of the same names have, which is the same API, and no more: a call of
something that is not there is an AttributeError, as it would be. The parser reads the ONNX file for real.
"""

from __future__ import annotations

import enum
import json
import os
from typing import Any

import onnx_ir as ir
import tensorrt_rtx as real
from plansmith.builder.targets.tensorrt.contract import PLUGINS

__version__ = "11.4.0.106"
PreviewFeature, DataType, TensorFormat = real.PreviewFeature, real.DataType, real.TensorFormat
DRIVE = json.loads(os.environ.get("TENSORRT_DOUBLE", "{}"))
"""What goes wrong: {"warning": text, "drop": input, "layers": fewer, "profile": bool, "parse": bool, "fail": bool}."""


class NetworkDefinitionCreationFlag(enum.IntEnum):
    """As TensorRT 11 has it; TensorRT-RTX has the first alone."""

    STRONGLY_TYPED, PREFER_JIT_PYTHON_PLUGINS, PREFER_AOT_PYTHON_PLUGINS = range(3)


class BuilderFlag(enum.Enum):
    """The one that is set here; REQUIRE_USER_ALLOCATION is TensorRT-RTX's alone."""

    WEIGHT_STREAMING = 20


class LayerType(enum.Enum):
    """The two that a test tells apart."""

    PLUGIN_V3, OTHER = range(2)


class Checked:
    """Takes attributes that the class `like` of tensorrt_rtx has."""

    like: Any

    def __setattr__(self, name: str, value: Any) -> None:
        assert name.startswith("_") or hasattr(self.like, name), (
            f"TensorRT has no {self.like.__name__}.{name}"
        )
        super().__setattr__(name, value)

    def __init_subclass__(cls) -> None:
        own = [name for name in vars(cls) if name[0] != "_" and name != "like"]
        missing = [name for name in own if not hasattr(cls.like, name)]
        assert not missing, f"TensorRT has no {cls.like.__name__}.{missing}"


class ILogger:
    """Prints nothing by itself."""

    VERBOSE, INFO, WARNING = "VERBOSE", "INFO", "WARNING"

    def log(self, severity: Any, message: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    """A base class."""


class IStreamWriter:
    """A base class."""


class Tensor(Checked):
    like = real.ITensor

    def __init__(self, value: ir.Value) -> None:
        kinds = {"FLOAT16": "HALF", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "FP8"}
        assert value.dtype is not None and value.shape is not None
        self.name = value.name
        self.dtype = getattr(DataType, kinds.get(value.dtype.name, value.dtype.name))
        self.shape = tuple(d if isinstance(d, int) else -1 for d in value.shape)


class Layer(Checked):
    like = real.ILayer

    def __init__(self, node: ir.Node) -> None:
        self.type = LayerType.PLUGIN_V3 if node.op_type in PLUGINS else LayerType.OTHER


class Network(Checked):
    like = real.INetworkDefinition

    def __init__(self, flags: int) -> None:
        assert flags == 1 << 0 | 1 << 2, "strongly typed, and the plugins' kernels in the plan"

    def _read(self, model: ir.Model) -> None:
        self._inputs = [Tensor(v) for v in model.graph.inputs if v.name != DRIVE.get("drop")]
        self._outputs = [Tensor(v) for v in model.graph.outputs]
        self._layers = [Layer(node) for node in model.graph][DRIVE.get("layers", 0) :]
        self.num_inputs, self.num_outputs = len(self._inputs), len(self._outputs)
        self.num_layers = len(self._layers)

    num_inputs = num_outputs = num_layers = 0

    def get_input(self, n: int) -> Tensor:
        return self._inputs[n]

    def get_output(self, n: int) -> Tensor:
        return self._outputs[n]

    def get_layer(self, n: int) -> Layer:
        return self._layers[n]


class OnnxParser(Checked):
    like = real.OnnxParser
    num_errors = 1

    def __init__(self, network: Network, logger: ILogger) -> None:
        self._network, self._logger = network, logger

    def parse_from_file(self, path: str) -> bool:
        from . import plugin

        model = ir.load(path)
        for node in model.graph:
            if node.op_type not in PLUGINS:
                continue
            # How TensorRT's parser finds a plugin: by name and namespace; its fields by the attributes' names.
            space = node.attributes["plugin_namespace"].as_string()
            assert (
                node.attributes["aot"].as_int() == 1 and node.attributes["plugin_version"].as_string() == "1"
            )
            inputs, attributes = plugin.REGISTERED[f"{space}::{node.op_type}"]
            own = set(node.attributes) - {"plugin_namespace", "plugin_version", "aot"}
            assert len(node.inputs) == len(inputs) and own == set(attributes), node.name
        self._network._read(model)
        if "warning" in DRIVE:
            self._logger.log(ILogger.WARNING, DRIVE["warning"])
        return not DRIVE.get("parse")

    def get_error(self, n: int) -> Any:
        class Error:
            def desc(self) -> str:
                return "told not to parse"

        return Error()


class Profile(Checked):
    like = real.IOptimizationProfile

    def __init__(self) -> None:
        self._shapes: dict[str, Any] = {}

    def set_shape(self, name: str, low: Any, opt: Any, high: Any) -> None:
        assert all(a <= b <= c for a, b, c in zip(low, opt, high, strict=True))
        self._shapes[name] = (low, opt, high)


class Config(Checked):
    like = real.IBuilderConfig
    progress_monitor: Any = None

    def __init__(self) -> None:
        self._features: dict[Any, bool] = {}
        self._profiles: list[Profile] = []
        self._flags: list[str] = []

    def set_flag(self, flag: BuilderFlag) -> None:
        self._flags.append(flag.name)

    def set_preview_feature(self, feature: Any, on: bool) -> None:
        self._features[feature] = on

    def add_optimization_profile(self, profile: Profile) -> int:
        self._profiles.append(profile)
        return -1 if DRIVE.get("profile") else 0


class Builder(Checked):
    like = real.Builder

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network_to_stream(self, network: Network, config: Config, writer: Any) -> bool:
        assert config._features == {PreviewFeature.ALIASED_PLUGIN_IO_10_03: True}
        (profile,) = config._profiles
        names = [network.get_input(n).name for n in range(network.num_inputs)]
        assert sorted(profile._shapes) == sorted(str(name) for name in names)
        monitor = config.progress_monitor
        monitor.phase_start("Building Engine", None, 2)
        assert monitor.step_complete("Building Engine", 0)
        monitor.phase_finish("Building Engine")
        plan = {**profile._shapes, "flags": config._flags}
        return not DRIVE.get("fail") and writer.write(json.dumps(plan).encode()) > 0
