"""trtllm-build's command line, as far as it means something here.

Names of limits and directories are options of `plansmith build` itself, with underscores or dashes. This table holds
the rest: flags that scripts carry along without harm are dropped with a note, flags that would change the result are
refused with what to use instead.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from ..runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Legacy:
    """A flag of trtllm-build.

    takes_value : it is followed by a value
    note : why it can be dropped, or, when refused, what to do instead
    harmless : values with which it can be dropped; None = all, () = none
    """

    takes_value: bool
    note: str
    harmless: tuple[str, ...] | None = None


_PLUGIN = Legacy(True, "plans here have no TensorRT-LLM plugins, kernels are chosen by the compiler")
_ON = Legacy(True, "this is always on", ("enable", "true", "True", "1"))
_OFF = Legacy(True, "there is no such mode; leave it out", ("disable", "false", "False", "0", "none"))
_LORA = Legacy(
    True,
    "the cpu target takes LoRA adapters when it runs (generate --lora NAME=DIR, Engine.load_adapter); for a GPU target "
    "merge them into the checkpoint",
)
_DRAFT = (
    "build with --draft int4 for a draft of the same model, or give another engine as --draft where this one runs; "
    "--speculation ngram needs none"
)
_PARALLEL = Legacy(True, "an engine runs on one device; leave it out", ("1",))
_ENCODER = Legacy(True, "only decoders are supported; leave it out", ("0",))

_KV_TYPE = (
    "what the KV cache holds is calibrated into the checkpoint: run plansmith quantize CHECKPOINT --kv-cache fp8 -o "
    "OUT (or int8), and build OUT"
)
_QUANTIZE = (
    "run plansmith quantize CHECKPOINT --recipe NAME -o OUT, and build OUT; int8 and int4 also as --precision"
)
_FP8_ATTENTION = "attention is computed in the type of the activations, never in fp8"

_PLUGIN_FLAGS = (
    "--attention-qk-half-accumulation",
    "--bert-attention-plugin",
    "--bert-context-fmha-fp32-acc",
    "--context-fmha",
    "--context-fmha-fp32-acc",
    "--enable-xqa",
    "--fp8-rowwise-gemm-plugin",
    "--fuse-fp4-quant",
    "--gemm-allreduce-plugin",
    "--gemm-plugin",
    "--gemm-swiglu-plugin",
    "--gpt-attention-plugin",
    "--identity-plugin",
    "--layernorm-quantization-plugin",
    "--lookup-plugin",
    "--low-latency-gemm-plugin",
    "--low-latency-gemm-swiglu-plugin",
    "--mamba-conv1d-plugin",
    "--moe-plugin",
    "--multi-block-mode",
    "--nccl-plugin",
    "--norm-quant-fusion",
    "--pp-reduce-scatter",
    "--quantize-per-token-plugin",
    "--quantize-tensor-plugin",
    "--reduce-fusion",
    "--rmsnorm-quantization-plugin",
    "--smooth-quant-gemm-plugin",
    "--use-fused-mlp",
    "--user-buffer",
    "--weight-only-groupwise-quant-matmul-plugin",
    "--weight-only-quant-matmul-plugin",
)

FLAGS: dict[str, Legacy] = {
    # plugins and kernel switches
    **dict.fromkeys(_PLUGIN_FLAGS, _PLUGIN),
    "--lora-plugin": _LORA,
    "--dora-plugin": Legacy(True, "DoRA adapters are not supported; merge them", ("disable",)),
    "--remove-input-padding": _ON,
    "--use-paged-context-fmha": _ON,
    "--paged-kv-cache": _ON,
    "--use-fp8-context-fmha": Legacy(True, _FP8_ATTENTION),
    "--multiple-profiles": Legacy(True, "a GPU plan has one profile for each kind of step, from the limits"),
    "--use-custom-all-reduce": Legacy(True, "an engine runs on one device, so it has no effect"),
    "--paged-state": Legacy(True, "models with recurrent state are not supported, so it has no effect"),
    "--streamingllm": _OFF,
    # builder
    "--strongly-typed": Legacy(False, "networks are always strongly typed"),
    "--opt-num-tokens": Legacy(True, "optimum shapes follow from the limits"),
    "--input-timing-cache": Legacy(True, "builds use no timing cache: it would need the GPU"),
    "--output-timing-cache": Legacy(True, "builds use no timing cache: it would need the GPU"),
    "--profiling-verbosity": Legacy(
        True, "plansmith inspect ENGINE_DIR --plan lists the cpu plan's operations"
    ),
    "--log-level": Legacy(True, "the compiler's log is in targets/<name>/build.log"),
    "--monitor-memory": Legacy(False, "peak memory is always in build_report.json"),
    "--fast-build": Legacy(False, "there is one kind of build"),
    "--builder-opt": Legacy(True, "there is one level of optimization"),
    "--strip-plan": Legacy(False, "plans carry their weights, refitting is not supported; leave it out", ()),
    "--refit": Legacy(False, "plans carry their weights, refitting is not supported; leave it out", ()),
    "--weight-sparsity": Legacy(False, "sparse weights are not supported; leave it out", ()),
    "--visualize-network": Legacy(True, "use: plansmith inspect ENGINE_DIR --plan", ()),
    "--enable-debug-output": Legacy(False, "use: plansmith verify, which compares the logits", ()),
    # what is built
    "--model-config": Legacy(True, "the checkpoint's own config.json is read; leave it out", ()),
    "--build-config": Legacy(True, "give the limits as options, e.g. --max-batch-size", ()),
    "--model-cls-file": Legacy(True, "no code of a checkpoint is run; leave it out", ()),
    "--model-cls-name": Legacy(True, "no code of a checkpoint is run; leave it out", ()),
    "--logits-dtype": Legacy(True, "logits are always float32; leave it out", ("float32",)),
    "--gather-context-logits": Legacy(False, "any engine gives them to a request that asks for them"),
    "--gather-all-token-logits": Legacy(False, "any engine gives them to a request that asks for them"),
    "--gather-generation-logits": Legacy(False, "any engine gives them to a request that asks for them"),
    "--max-prompt-embedding-table-size": Legacy(
        True, "prompt tuning and images are not supported; leave it out", ("0",)
    ),
    "--use-prompt-tuning": Legacy(False, "prompt tuning and images are not supported; leave it out", ()),
    "--use-embedding-sharing": Legacy(
        False, "an embedding that the checkpoint shares with the output layer is always shared"
    ),
    "--max-output-len": Legacy(True, "use --max_seq_len, which counts prompt and output together", ()),
    "--enable-fp8-kv-cache": Legacy(False, _KV_TYPE, ()),
    "--max-multimodal-len": Legacy(True, "prompt tuning and images are not supported; leave it out", ("0",)),
    "--max-encoder-input-len": _ENCODER,
    "--lora-dir": dataclasses.replace(
        _LORA, note="LoRA adapters are loaded when the cpu target runs: generate --lora NAME=DIR", harmless=()
    ),
    "--lora-ckpt-source": Legacy(True, "adapters are PEFT's, loaded when an engine runs", ("hf",)),
    "--lora-target-modules": _LORA,
    "--max-lora-rank": _LORA,
    "--speculative-decoding-mode": Legacy(
        True, f"any engine verifies drafts: {_DRAFT}", ("none", "draft_tokens_external")
    ),
    "--max-draft-len": Legacy(True, f"any engine verifies drafts: {_DRAFT}"),
    "--auto-parallel": _PARALLEL,
    "--tp-size": _PARALLEL,
    "--pp-size": _PARALLEL,
    "--gpus-per-node": Legacy(True, "an engine runs on one device, so it has no effect"),
    "--cluster-key": Legacy(True, "give the GPU as --target, e.g. --target sm89", ()),
    # of convert_checkpoint.py and quantize.py, which `plansmith build` does in one step
    "--dtype": Legacy(True, "use --precision", ()),
    "--use-weight-only": Legacy(False, "use --precision int8 or int4", ()),
    "--weight-only-precision": Legacy(True, "use --precision int8 or int4", ()),
    "--int8-kv-cache": Legacy(False, _KV_TYPE, ()),
    "--fp8-kv-cache": Legacy(False, _KV_TYPE, ()),
    "--qformat": Legacy(True, _QUANTIZE, ()),
}

# Old name -> option of `plansmith build`.
RENAMED = {"--max-decoder-seq-len": "--max-seq-len", "--model-dir": "--checkpoint-dir"}


def normalize(words: Sequence[str]) -> list[str]:
    """Return the words with dashes for the underscores in option names, up to a lone `--`."""
    result = list(words)
    for n, word in enumerate(words):
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            result[n] = name.replace("_", "-") + equals + value
    return result


def translate(
    words: Sequence[str],
    flags: Mapping[str, Legacy] = FLAGS,
    renamed: Mapping[str, str] = RENAMED,
    program: str = "trtllm-build",
) -> list[str]:
    """Return the words of a command without the legacy flags; a note on stderr for each that is dropped.

    words : as typed, with dashes or underscores; what is kept stays as typed
    flags, renamed, program : those of the command, and whose they were; the default is `plansmith build`
    raises InvalidArgumentError for a flag whose effect cannot be had, naming what to use instead.
    """
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*kept, word, *rest]
        typed, equals, value = word.partition("=")
        name = normalize([typed])[0]
        if name in renamed:
            kept.append(renamed[name] + equals + value)
        elif name in flags:
            flag = flags[name]
            shown = word
            if flag.takes_value and not equals:
                value = next(rest, "")
                shown = f"{word} {value}".rstrip()
            _judge(shown, value, flag, program)
        else:
            kept.append(word)
    return kept


def _judge(shown: str, value: str, flag: Legacy, program: str) -> None:
    if flag.harmless is not None and value not in flag.harmless:
        raise InvalidArgumentError(f"{shown} of {program} is not available: {flag.note}")
    print(f"plansmith: note: {shown} is ignored: {flag.note}", file=sys.stderr)
