"""From engine directories to executors: the target's, and the one that drafts for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizing.cpu_memory import DEFAULT_NUM_TOKENS
from .admission import Demand, admit, read_plans
from .batch import ModelInfo
from .engine_options import EngineOptions
from .errors import EngineFileError, Error, InvalidArgumentError, UnsupportedError
from .executor import Executor, PythonExecutor, cpu_executor
from .executors.options import AUTO, CPU, GpuOptions
from .manifest import Manifest, load_manifest
from .manifest_entries import FileEntry, LimitsEntry

if TYPE_CHECKING:
    from .executors.executor import TensorRtExecutor

SPECULATIONS = ("auto", "off", "ngram", "model")


@dataclasses.dataclass(frozen=True)
class CpuOptions:
    """Arguments of cpu_executor, for the target and for its draft."""

    num_threads: int = 0
    pin_threads: bool = False
    isa: str | None = None
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    weights: str = "auto"
    profile: bool = False  # of the target alone


@dataclasses.dataclass(frozen=True)
class Opening:
    """What is opened, after every check that needs no plan: a target, and what drafts for it.

    target : never "auto": what that stands for
    draft : the manifest that the draft's plan belongs to, the target's own or another's; None = no draft model
    draft_file : that plan
    """

    manifest: Manifest
    target: str
    options: EngineOptions
    draft: Manifest | None = None
    draft_file: FileEntry | None = None

    def check_files(self, *, hashes: bool) -> None:
        """Check that the files to open are there whole; raises EngineFileError."""
        self.manifest.check_files([self.target], hashes=hashes)  # its own draft is among them
        if self.draft is not None and self.draft is not self.manifest and self.draft_file is not None:
            fix = f"rebuild the draft with: {self.draft.build_command(self.target)} --force"
            self.draft.check_file(self.draft_file, hashes=hashes, what="draft plan", fix=fix)

    def executors(
        self, cpu: CpuOptions, gpu: GpuOptions | None = None
    ) -> tuple[Executor, EngineOptions, TensorRtExecutor | None]:
        """Open the plans; the options then hold the draft's executor, and the KV pools' size on a GPU.

        returns : the executor, the options, and on a GPU what tells its device's memory
        raises EngineFileError for a damaged plan; on a GPU also what open_tensorrt raises
        """
        if self.target != CPU:
            return self._gpu_executors(gpu or GpuOptions(), cpu)
        self.options.to_struct()  # refuses what is wrong before anything is opened
        cpu, options = self._admitted(cpu)
        tokens = options.max_num_tokens
        executor = _open(self.manifest.plan_path(self.target), self.manifest, cpu, tokens)
        if self.draft is None or self.draft_file is None:
            return executor, options, None
        try:
            draft = _open(
                self.draft.path(self.draft_file), self.draft, dataclasses.replace(cpu, profile=False), tokens
            )
        except Error:
            executor.close()
            raise
        return executor, dataclasses.replace(options, draft_mode="model", draft_executor=draft), None

    def _admitted(self, cpu: CpuOptions) -> tuple[CpuOptions, EngineOptions]:
        """Return the options with which the cpu plans fit into memory; raises OutOfMemoryError where none do."""
        paths = [self.manifest.plan_path(self.target)]
        if self.draft is not None and self.draft_file is not None:
            paths.append(self.draft.path(self.draft_file))
        plans, options = read_plans(paths), self.options
        if not plans:
            return cpu, options
        rank = 64 if cpu.max_adapter_rank is None else cpu.max_adapter_rank
        found = admit(
            Demand(
                f"target {self.target} of {self.manifest.root}",
                plans,
                cpu.num_threads,
                cpu.weights,
                0 if cpu.max_adapters == 0 else rank,
                options.max_batch_size,
                options.max_num_tokens,
                options.kv_cache_bytes,
                options.host_cache_bytes,
            )
        )
        return (
            dataclasses.replace(cpu, weights=found.weights),
            dataclasses.replace(options, kv_cache_bytes=found.kv_cache_bytes),
        )

    def _gpu_executors(
        self, gpu: GpuOptions, cpu: CpuOptions
    ) -> tuple[Executor, EngineOptions, TensorRtExecutor]:
        """Open the plans on a GPU, where the pools get a share of what is left; the draft's are in the same budget."""
        if cpu.max_adapters:
            raise UnsupportedError(
                f"max_adapters is {cpu.max_adapters}, and a TensorRT plan takes no LoRA adapters; open the cpu target, "
                "or merge the adapter into the checkpoint before it is built"
            )
        if cpu.profile:
            raise UnsupportedError(
                f"the executor of target {self.target} keeps no profile of its ops; open the cpu target, or take the "
                "profile with NVIDIA's own tools (nsys)"
            )
        from .executors.opening import open_tensorrt  # what drives a GPU is not loaded for a CPU

        options = self.options
        options.to_struct()  # refuses what is wrong before anything is opened
        opened: list[TensorRtExecutor] = []
        try:
            target = open_tensorrt(self.manifest, self.target, gpu, kv_cache_bytes=options.kv_cache_bytes)
            opened.append(target)
            draft = None
            if self.draft is not None:
                manifest = _draft_manifest(self.manifest, self.draft, self.target)
                # A draft has to be fast: its weights are not streamed.
                draft = open_tensorrt(
                    manifest, self.target, dataclasses.replace(gpu, gpu_weights_percent=None)
                )
                opened.append(draft)
            budget = target.kv_budget(options.kv_cache_free_gpu_mem_fraction, options.kv_cache_bytes, draft)
            options = dataclasses.replace(options, kv_cache_bytes=budget)
            if draft is not None:
                drafting = PythonExecutor(draft)
                options = dataclasses.replace(options, draft_mode="model", draft_executor=drafting)
            return PythonExecutor(target), options, target
        except BaseException:
            for one in reversed(opened):
                one.close()
            raise


def plan_opening(
    engine_dir: Path | str,
    target: str,
    draft: Path | str | None,
    speculation: str,
    options: Mapping[str, Any],
    device: int | str | None = None,
) -> Opening:
    """Return what to open, from manifests alone.

    device : the one that "auto" has to run on, see GpuOptions
    raises EngineFileError, InvalidArgumentError for what contradicts or a draft that does not fit, UnsupportedError
    """
    manifest = load_manifest(engine_dir)
    for name in ("draft_mode", "draft_executor"):
        if name in options:
            raise InvalidArgumentError(
                f"{name} follows from speculation and draft when an engine directory is opened; give "
                "speculation='ngram', or draft=ENGINE_DIR"
            )
    made = EngineOptions(**options)
    if target == AUTO:
        from .executors.opening import usable_target

        target = usable_target(manifest, device=device)
    if target == CPU and made.max_num_tokens == 0 and made.enable_chunked_context:
        budget = min(max(DEFAULT_NUM_TOKENS, made.max_batch_size), manifest.limits.max_num_tokens)
        made = dataclasses.replace(made, max_num_tokens=budget)
    manifest.target(target)
    _check_speculation(speculation, draft)
    if speculation == "ngram":
        return Opening(manifest, target, dataclasses.replace(made, draft_mode="ngram"))
    if speculation == "off":
        return Opening(manifest, target, made)
    if draft is not None:
        other = load_manifest(draft)
        file = other.target(target).files[0]
        _check_draft(manifest, other, made, target)
        return Opening(manifest, target, made, other, file)
    own = None if manifest.draft is None else manifest.draft.targets.get(target)
    if own is not None:
        return Opening(manifest, target, made, manifest, own.files[0])
    if speculation == "model":
        raise InvalidArgumentError(
            f"speculation is 'model', and {manifest.root} has no draft for {target}; "
            + ("" if (command := _own_draft(manifest, target)) is None else f"add one with: {command}, ")
            + "give draft=ENGINE_DIR of a smaller model, or use 'ngram'"
        )
    return Opening(manifest, target, made)


def _draft_manifest(manifest: Manifest, draft: Manifest, target: str) -> Manifest:
    """Return a manifest whose target is what drafts: another engine's own, or this engine's draft in its place."""
    if draft is not manifest or manifest.draft is None:
        return draft
    return dataclasses.replace(manifest, targets={target: manifest.draft.targets[target]}, draft=None)


def _check_speculation(speculation: str, draft: Path | str | None) -> None:
    if speculation not in SPECULATIONS:
        raise InvalidArgumentError(
            f"speculation is {speculation!r}, it must be one of {', '.join(SPECULATIONS)}"
        )
    if draft is not None and speculation in ("off", "ngram"):
        raise InvalidArgumentError(
            f"speculation is {speculation!r} and a draft is given, which it does not use; leave one of them out"
        )


def _check_draft(manifest: Manifest, draft: Manifest, options: EngineOptions, target: str) -> None:
    """Refuse a draft whose tokens mean something else, or that is too small, with the command that mends it."""
    if draft.model.vocab_size != manifest.model.vocab_size:
        raise _disagrees(
            manifest, draft, target, "vocab_size", draft.model.vocab_size, manifest.model.vocab_size
        )
    _check_tokenizers(manifest, draft, target)
    limits, own = manifest.limits, draft.limits
    batch = options.max_batch_size or limits.max_batch_size
    least = {"max_seq_len": limits.max_seq_len, "max_batch_size": batch, "max_num_tokens": batch}
    if own.tokens_per_block != limits.tokens_per_block:
        raise _too_small(draft, target, "tokens_per_block", limits.tokens_per_block, "the engine has", limits)
    for name, needed in least.items():
        if getattr(own, name) < needed:
            raise _too_small(draft, target, name, needed, "the engine needs", limits)


def _disagrees(
    manifest: Manifest, draft: Manifest, target: str, what: str, has: object, wanted: object
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the draft in {draft.root} has {what} {has}, the engine in {manifest.root} has {wanted}: a draft must have "
        "the same vocabulary; "
        + (
            "give one of a smaller model of the same family, or use speculation 'ngram'"
            if (command := _own_draft(manifest, target)) is None
            else f"build one from the engine's own checkpoint with: {command}"
        )
    )


def _own_draft(manifest: Manifest, target: str) -> str | None:
    """Return the command that adds a draft of the engine's own checkpoint; None where nothing is smaller."""
    return None if manifest.precision == "int4" else manifest.build_command(target, draft="int4")


def _too_small(
    draft: Manifest, target: str, name: str, needed: int, why: str, limits: LimitsEntry
) -> InvalidArgumentError:
    mended = draft.limits
    for field in ("max_seq_len", "max_batch_size", "max_num_tokens"):
        most = max(getattr(mended, field), getattr(limits, field))
        mended = dataclasses.replace(mended, **{field: most})
    mended = dataclasses.replace(mended, tokens_per_block=limits.tokens_per_block)
    command = dataclasses.replace(draft, limits=mended).build_command(",".join(draft.targets) or target)
    return InvalidArgumentError(
        f"the draft in {draft.root} has {name} {getattr(draft.limits, name)}, {why} {needed}; rebuild it with: "
        f"{command}"
    )


def _check_tokenizers(manifest: Manifest, draft: Manifest, target: str) -> None:
    """Refuse a draft whose ids stand for other tokens. Files may differ in what is no vocabulary, e.g. a template."""
    files = [_tokenizer_file(one) for one in (manifest, draft)]
    if files[0] is None or files[1] is None:
        if files[0] is not files[1]:
            has = ["no tokenizer" if file is None else "one" for file in files]
            raise _disagrees(manifest, draft, target, "a tokenizer:", has[1], has[0])
        return
    if files[0].sha256 == files[1].sha256:
        return
    own, others = (_vocabulary(one, file) for one, file in ((manifest, files[0]), (draft, files[1])))
    differing = [token for token in own.keys() | others.keys() if own.get(token) != others.get(token)]
    if differing:
        token = min(differing, key=lambda one: (own.get(one, 1 << 62), one))
        what = f"another tokenizer ({len(differing)} tokens differ), in which {token!r} is the id"
        raise _disagrees(manifest, draft, target, what, others.get(token), own.get(token))


def _tokenizer_file(manifest: Manifest) -> FileEntry | None:
    return next((one for one in manifest.tokenizer.files if one.path.endswith("/tokenizer.json")), None)


def _vocabulary(manifest: Manifest, file: FileEntry) -> dict[str, int]:
    import tokenizers

    path = manifest.path(file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise EngineFileError(f"{path} is damaged ({error}); build the engine again") from error
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return vocabulary


def _open(plan: Path, manifest: Manifest, cpu: CpuOptions, max_num_tokens: int) -> Executor:
    """Return a plan's executor, with memory for steps of so many tokens, 0 = the plan's; the engine checks them."""
    tokens = min(max_num_tokens, manifest.limits.max_num_tokens) if max_num_tokens > 0 else 0
    executor = cpu_executor(plan, **dataclasses.asdict(cpu), max_num_tokens=tokens)
    try:
        _compare_limits(executor.describe(), manifest)
    except Error:
        executor.close()
        raise
    return executor


def _compare_limits(info: ModelInfo, manifest: Manifest) -> None:
    """Refuse a plan that is not the one the manifest describes."""
    wanted: Mapping[str, int] = {
        "vocab_size": manifest.model.vocab_size,
        "num_layers": manifest.model.num_layers,
        "max_seq_len": manifest.limits.max_seq_len,
        "tokens_per_block": manifest.limits.tokens_per_block,
    }
    for name, value in wanted.items():
        if getattr(info, name) != value:
            raise EngineFileError(
                f"the plan in {manifest.root} has {name} {getattr(info, name)}, manifest.json says {value}; "
                "build the engine again"
            )
