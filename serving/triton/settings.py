"""What the parameters of `tensorrt_llm` say, as values: how the engine is opened, how the model answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.engine_options import EngineOptions
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.executors.opening import usable_target
from ...runtime.executors.options import AUTO, CPU
from ...runtime.manifest import Manifest, load_manifest
from ...runtime.opening import plan_opening


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the model `tensorrt_llm`, each checked by itself.

    engine_dir : the engine directory
    target : of it, or "auto"
    device, cuda_graphs, cuda_graph_cache_size, gpu_weights_percent : of a GPU target, as Engine.open takes them
    options : fields of EngineOptions by name; absent = their defaults. See `open_arguments` for the KV cache
    num_threads, pin_threads, isa, weights : of the cpu target, as Engine.open takes them
    draft, speculation : as Engine.open takes them
    max_kv_tokens : of the KV cache, over all sequences; None = unbounded. With kv_cache_bytes the smaller counts
    attention_windows : asked for, by layer, repeated; () = the model's own. Narrower ones are refused
    verify_hashes : read every file of the engine before it is opened

    exclude_input : leave the prompt out of output_ids where a request does not say
    max_beam_width : a wider beam is refused
    logits_dtype : "float32" or "float16": of logits in requests and answers
    is_decoupled : a request may have several answers, so it may stream and may be a batch
    max_batch_size : rows of a request; 0 = requests have no batch dimension
    cancellation_check_period_ms : between two looks for clients that went away
    stats_check_period_ms : between two updates of the metrics
    stream_interval_ms : least time between two answers of a stream; None = by their cost
    guided_backend : "llguidance", the only one; "off" = guided requests are refused

    max_adapters : LoRA adapters the engine holds at a time; None = 8. A GPU target takes none
    max_adapter_rank : their largest rank; None = 64
    lora_host_memory_bytes : of adapters that requests brought and the engine does not hold
    lora_prefetch_dir : adapters to load at the start, in directories named by their task id; None = none
    """

    engine_dir: Path
    target: str = CPU
    device: str | None = None
    cuda_graphs: str = "auto"
    cuda_graph_cache_size: int = 0
    gpu_weights_percent: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_threads: int = 0
    pin_threads: bool = False
    isa: str | None = None
    weights: str = "auto"
    draft: Path | None = None
    speculation: str = "auto"
    max_kv_tokens: int | None = None
    attention_windows: tuple[int, ...] = ()
    verify_hashes: bool = False

    exclude_input: bool = False
    max_beam_width: int = 1
    logits_dtype: str = "float32"
    is_decoupled: bool = True
    max_batch_size: int = 0
    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 100
    stream_interval_ms: float | None = None
    guided_backend: str = "llguidance"

    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    lora_host_memory_bytes: int = 1 << 30
    lora_prefetch_dir: Path | None = None

    def open_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of Engine.open, after reading the engine's manifest.

        raises EngineFileError for a directory that is no engine or has no such target, InvalidArgumentError for a
            parameter that goes beyond what the engine was built for, UnsupportedError for adapters on a GPU target
        """
        manifest = load_manifest(self.engine_dir)
        target = usable_target(manifest, device=self.device) if self.target == AUTO else self.target
        if target != self.target:
            return dataclasses.replace(self, target=target).open_arguments()
        manifest.target(target)
        _check_beams(self.max_beam_width, manifest)
        _check_windows(self.attention_windows, manifest)
        takes_adapters = target == CPU
        if self.lora_prefetch_dir is not None and not takes_adapters:
            raise UnsupportedError(
                f"lora_prefetch_dir is {str(self.lora_prefetch_dir)!r}, and target {target} takes no LoRA adapters; "
                "leave it empty, or run the cpu target"
            )
        options = dict(self.options)
        if self.max_kv_tokens is not None:
            own = kv_bytes(self, manifest, self.max_kv_tokens)
            options["kv_cache_bytes"] = min(own, options.get("kv_cache_bytes") or own)
        return {
            "engine_dir": self.engine_dir,
            "target": self.target,
            "device": self.device,
            "cuda_graphs": self.cuda_graphs,
            "cuda_graph_cache_size": self.cuda_graph_cache_size,
            "gpu_weights_percent": self.gpu_weights_percent,
            "draft": self.draft,
            "speculation": self.speculation,
            "num_threads": self.num_threads,
            "pin_threads": self.pin_threads,
            "isa": self.isa,
            "weights": self.weights,
            "max_adapters": self.max_adapters if takes_adapters else None,
            "max_adapter_rank": self.max_adapter_rank if takes_adapters else None,
            "verify_hashes": self.verify_hashes,
            **options,
        }

    def check(self) -> None:
        """Raise what opening the engine would raise, as far as that shows without opening its plan."""
        arguments = self.open_arguments()
        names = {field.name for field in dataclasses.fields(EngineOptions)}
        options = {name: value for name, value in arguments.items() if name in names}
        opening = plan_opening(self.engine_dir, self.target, self.draft, self.speculation, options)
        opening.options.to_struct()
        opening.check_files(hashes=False)


def kv_bytes(settings: Settings, manifest: Manifest, num_tokens: int) -> int:
    """Return the bytes of whole blocks for so many tokens, with the pools of the draft, which share the budget."""
    block = manifest.limits.tokens_per_block
    per_token = manifest.model.kv_bytes_per_token(manifest.target(settings.target).kv_dtype)
    drafter = manifest if settings.draft is None else load_manifest(settings.draft)
    if settings.speculation in ("auto", "model"):
        if settings.draft is not None:
            kind = drafter.target(settings.target).kv_dtype
            per_token += drafter.model.kv_bytes_per_token(kind)
        elif manifest.draft is not None and settings.target in manifest.draft.targets:
            kind = manifest.draft.targets[settings.target].kv_dtype
            per_token += manifest.model.kv_bytes_per_token(kind)
    return -(-num_tokens // block) * block * per_token


def _check_beams(max_beam_width: int, manifest: Manifest) -> None:
    limit = manifest.limits.max_beam_width
    if max_beam_width > limit:
        raise InvalidArgumentError(
            f"max_beam_width is {max_beam_width}, the engine in {manifest.root} takes at most {limit}; lower it, or "
            f"build the engine again with --max-beam-width {max_beam_width}"
        )


def _check_windows(asked: tuple[int, ...], manifest: Manifest) -> None:
    """Refuse windows that are narrower than the model's own: its answers would change."""
    layer = narrower_window(asked, manifest)
    if layer is not None:
        raise InvalidArgumentError(
            f"max_attention_window_size asks for {asked[layer % len(asked)]} tokens in layer {layer}, whose own window "
            f"is {_window(layer, manifest)}: the engine keeps the windows it was built with; leave the parameter "
            "empty, or bound the memory with max_tokens_in_paged_kv_cache"
        )


def narrower_window(asked: tuple[int, ...], manifest: Manifest) -> int | None:
    """Return the first layer whose window would be narrower than its own; None when there is none."""
    layers = range(manifest.model.num_layers if asked else 0)
    return next((one for one in layers if asked[one % len(asked)] < _window(one, manifest)), None)


def _window(layer: int, manifest: Manifest) -> int:
    """Return the tokens that a layer sees at most."""
    own, longest = manifest.model.windows[layer], manifest.limits.max_seq_len
    return min(own or longest, longest)
