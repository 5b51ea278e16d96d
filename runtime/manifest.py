"""manifest.json: what an engine directory holds, checked before anything in it is opened.

Standard library only, so that a server or a deployment script can read it alone. Every field is typed and ranged, a
field that this version does not know is refused by name, and a checksum over the content finds the edits that leave
it plausible.
"""

# ruff: noqa: RUF009 - these calls make the fields

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from . import manifest_fields as read
from .errors import EngineFileError
from .file_kind import MISSING, no_file
from .manifest_entries import (
    CheckpointEntry,
    DraftEntry,
    FileEntry,
    GraphContractEntry,
    HostEntry,
    LimitsEntry,
    ModelEntry,
    TargetEntry,
    TokenizerEntry,
)
from .manifest_fields import Fields, to_json

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
GRAPH_CONTRACT_VERSION = (
    1  # of the graphs this runtime can drive; builder/graph/contract.py has the same number
)
MAX_MANIFEST_BYTES = 16 << 20
# What --target of `plansmith build` takes; builder/targets/registry.py has the same names.
BUILDABLE = (
    *("cpu", "sm75", "sm80", "sm86", "sm89", "sm120", "rtx"),
    *("sm90", "sm100", "sm103", "sm80-tensorrt", "sm86-tensorrt", "sm89-tensorrt", "sm120-tensorrt"),
)


@dataclasses.dataclass(frozen=True)
class Manifest(Fields):
    """The whole of manifest.json, and the directory it was read from (`root`, no part of equality)."""

    schema_version: int = read.integer(SCHEMA_VERSION, SCHEMA_VERSION)
    plansmith_version: str = read.text()
    created: str = read.time()
    host: HostEntry = read.entry(HostEntry)
    model: ModelEntry = read.entry(ModelEntry)
    precision: str = read.text()
    limits: LimitsEntry = read.entry(LimitsEntry)
    tokenizer: TokenizerEntry = read.entry(TokenizerEntry)
    graph_contract: GraphContractEntry = read.entry(GraphContractEntry)
    checkpoint: CheckpointEntry = read.entry(CheckpointEntry)
    targets: dict[str, TargetEntry] = read.entry_map(TargetEntry)
    draft: DraftEntry | None = read.optional_entry(DraftEntry)
    root: pathlib.Path = dataclasses.field(default=pathlib.Path(), compare=False)

    def target(self, name: str) -> TargetEntry:
        """Return a target; EngineFileError lists those there are, and says how to add one that can be built."""
        if name in self.targets:
            return self.targets[name]
        fix = (
            f"add it with: {self.build_command(name)}"
            if name in BUILDABLE
            else f"this version cannot build that one; it builds {', '.join(BUILDABLE)}"
        )
        raise EngineFileError(
            f"{self.root} has no target {name!r}, only {', '.join(self.targets) or 'none'}; {fix}"
        )

    def path(self, entry: FileEntry) -> pathlib.Path:
        """Return where a file of this engine is; EngineFileError if a symbolic link leads out of the directory."""
        path = self.root / entry.path
        real = pathlib.Path(os.path.realpath(path))  # a loop of links ends in itself, and no_file says so
        if not real.is_relative_to(os.path.realpath(self.root)):
            raise EngineFileError(
                f"{entry.path} of {self.root} leads outside the engine directory (to {real}); "
                "copy the file itself into the directory, or build the engine again"
            )
        return path

    def plan_path(self, name: str) -> pathlib.Path:
        """Return the path of a target's plan, its first file."""
        return self.path(self.target(name).files[0])

    def kernels_dir(self, name: str) -> pathlib.Path | None:
        """Return the folder of a target's device kernels (executors/kernel_bundle.py); None where it has none."""
        files = self.target(name).kernel_files()
        return self.path(files[0]).parent if files else None

    def draft_files(self, name: str) -> tuple[FileEntry, ...]:
        """Return the files of what drafts for a target; () when there is none."""
        target = None if self.draft is None else self.draft.targets.get(name)
        return () if target is None else target.files

    def all_files(self) -> list[FileEntry]:
        """Return the files of all targets, of what drafts for them, and of the tokenizer."""
        entries = [entry for one in self.targets.values() for entry in one.files]
        drafts = [entry for name in self.targets for entry in self.draft_files(name)]
        return [*self.tokenizer.files, *entries, *drafts]

    def check_files(self, targets: Iterable[str] | None = None, *, hashes: bool = False) -> None:
        """Check that the files are there whole: sizes always, contents too with hashes.

        targets : names to look at, all when None. The tokenizer's contents are always compared: it is small, and
            another tokenizer beside the same weights gives fluent nonsense instead of an error. So are those of device
            kernels, which are launched with the arguments that kernels.json says.
        raises EngineFileError for the first file that is missing, cut short or changed.
        """
        for entry in self.tokenizer.files:
            self.check_file(entry, hashes=True, what="tokenizer file", fix=self._rebuild())
        for name in self.targets if targets is None else targets:
            kernels = self.target(name).kernel_files()
            for entry in self.target(name).files:
                contents = hashes or entry in kernels
                self.check_file(
                    entry, hashes=contents, what=f"file of target {name}", fix=self._rebuild(name)
                )
            for entry in self.draft_files(name):
                self.check_file(entry, hashes=hashes, what=f"draft of target {name}", fix=self._rebuild(name))

    def build_command(self, targets: str, *, draft: str | None = None) -> str:
        """Return the command that builds `targets` into this directory, at its precision and limits.

        draft : the precision of a draft to build with them; None = as the directory has it
        """
        limits = self.limits
        draft = draft or (self.draft.precision if self.draft is not None else None)
        return (
            f"plansmith build {self.checkpoint.path} -o {self.root} --target {targets} --precision {self.precision} "
            f"--max-batch-size {limits.max_batch_size} --max-num-tokens {limits.max_num_tokens} "
            f"--max-input-len {limits.max_input_len} --max-seq-len {limits.max_seq_len} "
            f"--tokens-per-block {limits.tokens_per_block}"
            + (f" --max-beam-width {limits.max_beam_width}" if limits.max_beam_width > 1 else "")
            + (f" --draft {draft}" if draft else "")
            + (" --weight-streaming" if self._streams_weights(targets) else "")
            + "".join(f" --group-size {size}" for size in self._group_sizes(targets)[:1])
            + self._kv_cache_option(targets)
        )

    def _kv_cache_option(self, targets: str) -> str:
        """Return the option for float KV pools that a build of the cpu target would not have by itself."""
        entry = self.targets.get("cpu") if "cpu" in targets.split(",") else None
        own = "float32" if self.precision == "fp32" else "float16"
        if entry is None or entry.kv_dtype not in ("float32", "float16") or entry.kv_dtype == own:
            return ""
        return f" --kv-cache-dtype {entry.kv_dtype}"

    def _streams_weights(self, targets: str) -> bool:
        """Whether one of the named targets is here, built with weight streaming."""
        named = (self.targets.get(name) for name in targets.split(","))
        return any(entry is not None and entry.streams_weights for entry in named)

    def _group_sizes(self, targets: str) -> list[int]:
        """Return what --group-size was for the named targets that are here and had one."""
        named = (self.targets.get(name) for name in targets.split(","))
        return [entry.group_size for entry in named if entry is not None and entry.group_size is not None]

    def _rebuild(self, name: str | None = None) -> str:
        command = self.build_command(name or ",".join(self.targets))
        again = "copy the engine again (plansmith fleet pull --check-hashes, of a fleet)"
        return f"{again}, or rebuild with: {command} --force"

    def check_file(self, entry: FileEntry, *, hashes: bool, what: str, fix: str = "build it again") -> None:
        """Check one file, as check_files does."""
        path = self.path(entry)
        try:
            if (wrong := no_file(path)) is not None:
                where = f"{entry.path} {wrong} in {self.root}" if wrong == MISSING else f"{path} {wrong}"
                raise EngineFileError(f"{what} {where}; {fix}")
            size = path.stat().st_size
            if size != entry.size:
                raise EngineFileError(
                    f"{what} {path} has {size} bytes, manifest.json says {entry.size}: it was cut short or "
                    f"replaced; {fix}"
                )
            if hashes and (got := hash_file(path)) != entry.sha256:
                raise EngineFileError(
                    f"{what} {path} has sha256 {got[:16]}…, manifest.json says {entry.sha256[:16]}…: its contents "
                    f"changed after the build; {fix}"
                )
        except OSError as error:
            raise EngineFileError(f"{what} {path} cannot be read: {error.strerror}; {fix}") from error

    def to_text(self) -> str:
        """Return manifest.json as text, its checksum included."""
        content = to_json(self)
        content["checksum"] = checksum(content)
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def checksum(content: dict[str, Any]) -> str:
    """Return the sha256 over a manifest's content in canonical form, without its checksum field."""
    plain = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: pathlib.Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_entries(entries: Iterable[FileEntry]) -> str:
    """Return one hash over several files: their names and contents, whatever their order."""
    lines = sorted(f"{entry.path}:{entry.sha256}" for entry in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load_manifest(engine_dir: str | pathlib.Path) -> Manifest:
    """Return the checked manifest of an engine directory. Files are not opened: see Manifest.check_files.

    raises EngineFileError when it is no engine directory, the manifest is damaged or of another version.
    """
    root = pathlib.Path(engine_dir)
    path = root / MANIFEST_NAME
    try:
        wrong = no_file(path)
        if wrong == MISSING:
            raise EngineFileError(_not_an_engine(root))
        if wrong is not None:
            raise EngineFileError(f"{path} {wrong}; copy the engine again, or build it again")
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise EngineFileError(
                f"{path} is larger than {MAX_MANIFEST_BYTES} bytes, so no manifest; build the engine again"
            )
        data = path.read_bytes()
    except OSError as error:
        raise EngineFileError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return parse_manifest(data, root)


def parse_manifest(data: bytes, root: pathlib.Path) -> Manifest:
    """Return the manifest of manifest.json's bytes; `root` is its directory. Raises EngineFileError."""
    path = root / MANIFEST_NAME
    content = read.parse_json(data, str(path))
    _check_versions(content, path)
    stored = content.pop("checksum", None)
    manifest = Manifest.read(content, str(path))
    _check_consistency(manifest, path)
    if stored != checksum(to_json(manifest)):
        raise EngineFileError(
            f"{path} was changed after the build (its checksum differs); a limit or a size cannot be edited there, "
            "build the engine again with the values wanted"
        )
    return dataclasses.replace(manifest, root=root)


def _check_versions(content: dict[str, Any], path: pathlib.Path) -> None:
    version = content.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise EngineFileError(
            f"{path} has no schema_version number, so it is not plansmith's; build the engine again"
        )
    by = str(content.get("plansmith_version", "unknown"))[:40]
    if version > SCHEMA_VERSION:
        raise EngineFileError(
            f"{path} has schema version {version} (written by plansmith {by}), this plansmith reads {SCHEMA_VERSION}; "
            "upgrade plansmith: pip install --upgrade plansmith"
        )
    if version < SCHEMA_VERSION:
        raise EngineFileError(
            f"{path} has schema version {version} (written by plansmith {by}), this plansmith reads {SCHEMA_VERSION}; "
            "build the engine again with: plansmith build CHECKPOINT -o " + str(path.parent) + " --force"
        )


def _check_consistency(manifest: Manifest, path: pathlib.Path) -> None:
    """Check what no single field shows."""
    model, limits = manifest.model, manifest.limits
    rules = [
        (len(model.windows) == model.num_layers, "model.windows must have one number a layer"),
        (
            model.num_heads % model.num_kv_heads == 0,
            "model.num_heads must be a multiple of model.num_kv_heads",
        ),
        (
            limits.max_input_len <= limits.max_seq_len,
            "limits.max_input_len must not exceed limits.max_seq_len",
        ),
        (
            limits.max_seq_len <= model.max_position_embeddings,
            "limits.max_seq_len must not exceed model.max_position_embeddings",
        ),
        (all(target.files for target in _all_targets(manifest)), "every target must have a file"),
        (
            manifest.draft is None or manifest.draft.targets.keys() <= manifest.targets.keys(),
            "draft.targets must be among targets",
        ),
        (
            manifest.tokenizer.sha256 == hash_entries(manifest.tokenizer.files),
            "tokenizer.sha256 must be the hash of tokenizer.files",
        ),
    ]
    for holds, text in rules:
        if not holds:
            raise EngineFileError(f"{path} contradicts itself: {text}; build the engine again")
    if manifest.graph_contract.version != GRAPH_CONTRACT_VERSION:
        raise EngineFileError(
            f"{path} has graph contract {manifest.graph_contract.version}, this runtime drives "
            f"{GRAPH_CONTRACT_VERSION}; build the engine again with this version of plansmith"
        )


def _all_targets(manifest: Manifest) -> list[TargetEntry]:
    drafts = {} if manifest.draft is None else manifest.draft.targets
    return [*manifest.targets.values(), *drafts.values()]


def _not_an_engine(root: pathlib.Path) -> str:
    """Say why `root` is no engine directory, by what is there instead."""
    if not root.exists():
        return f"{root} does not exist; give an engine directory, or make one: plansmith build CHECKPOINT -o {root}"
    if not root.is_dir():
        return f"{root} is a file, an engine is a directory with a {MANIFEST_NAME}; give the directory"
    head = f"{root} is not an engine directory: it has no {MANIFEST_NAME}"
    if any(root.glob("rank*.engine")):
        return (
            f"{head} but a TensorRT-LLM engine, which cannot be read; build one from the checkpoint: "
            "plansmith build CHECKPOINT -o ENGINE_DIR"
        )
    if any(root.glob("*.safetensors")) or any(root.glob("*.gguf")):
        return f"{head} but a checkpoint; build the engine first: plansmith build {root} -o ENGINE_DIR"
    return f"{head}; make one with: plansmith build CHECKPOINT -o {root}"
