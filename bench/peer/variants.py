"""The engines with each kind of their weights: what they are called, and which of them a command line names."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType

MODULES = ("plansmith", "llama_cpp", "openvino", "ort_genai", "ctranslate2", "vllm_cpu", "transformers")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One engine with one kind of weights."""

    module: ModuleType
    name: str

    @property
    def label(self) -> str:
        """Return `<engine> <variant>`."""
        return f"{self.module.NAME} {self.name}"

    @property
    def slug(self) -> str:
        """Return what names the variant on the command line and in files: `<module>:<variant>`."""
        return f"{self.module.__name__.rpartition('.')[2]}:{self.name}"

    @property
    def is_ours(self) -> bool:
        """Return whether this is plansmith itself."""
        return self.slug.startswith("plansmith:")


def all_variants(modules: Iterable[str] = MODULES) -> list[Variant]:
    """Return every variant of the modules, ours first."""
    loaded = [importlib.import_module(f"peer.{name}") for name in modules]
    return [Variant(module, name) for module in loaded for name in module.VARIANTS]


def chosen(variants: Sequence[Variant], wanted: str | None) -> list[Variant]:
    """Return those that a list like `plansmith,llama_cpp:q8_0` names, all where it is None.

    raises ValueError for a name there is not, and for a list without names
    """
    if wanted is None:
        return list(variants)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    there = f"there are {', '.join(v.slug for v in variants)}, or a module's name for all of it"
    if not names:
        raise ValueError(f"{wanted!r} names no variant; {there}")
    for name in names:
        if not any(name in (v.slug, v.slug.split(":")[0]) for v in variants):
            raise ValueError(f"no variant {name!r}; {there}")
    return [v for v in variants if v.slug in names or v.slug.split(":")[0] in names]
