"""The LoRA adapters that an engine has loaded, by name."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .batch import ModelInfo
from .errors import InvalidArgumentError, NotFoundError
from .lora import LoraAdapter, Widths, load_adapter_dir
from .lora_arrays import adapter_from_arrays
from .manifest_entries import ModelEntry
from .native_engine import NativeEngine


class AdapterTable:
    """Names and ids of loaded adapters. Any thread."""

    def __init__(self, core: NativeEngine, info: ModelInfo, model: ModelEntry | None) -> None:
        self._core = core
        self._info = info
        self._model = model
        self._lock = threading.Lock()
        self._next_id = itertools.count(1)
        self.ids: dict[str, int] = {}

    def load(self, name: str, path: Path | str) -> int:
        """Load a directory under a name; see EngineBase.load_adapter."""
        return self._load(name, lambda: load_adapter_dir(path, self._info, self._model))

    def load_arrays(self, name: str, config: NDArray[Any], weights: NDArray[Any]) -> int:
        """Load two arrays under a name; see EngineBase.load_adapter_arrays."""
        widths = Widths.of(self._info, self._model)
        return self._load(name, lambda: adapter_from_arrays(config, weights, widths))

    def _load(self, name: str, read: Callable[[], LoraAdapter]) -> int:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"the adapter's name is {name!r}, it must be a text")
        self._refuse_inside_step()
        with self._lock:
            if name in self.ids:
                raise InvalidArgumentError(
                    f"an adapter {name!r} is loaded already; unload it first, or give another name"
                )
            adapter = read()
            structs, _keep_alive = adapter.to_structs()
            adapter_id = next(self._next_id)  # never used again: cached blocks are known by it
            self._core.load_adapter(adapter_id, structs, len(adapter.modules))
            self.ids = {**self.ids, name: adapter_id}
            return adapter_id

    def unload(self, name: str) -> None:
        """Forget an adapter; see EngineBase.unload_adapter."""
        self._refuse_inside_step()
        with self._lock:
            if name not in self.ids:
                raise NotFoundError(self._unknown(name))
            self._core.unload_adapter(self.ids[name])
            self.ids = {key: value for key, value in self.ids.items() if key != name}

    def id_of(self, adapter: str | int | None) -> int:
        """Return the core's id of an adapter given by its name or id, 0 for none; InvalidArgumentError if unknown."""
        ids = self.ids
        if adapter is None:
            return 0
        if isinstance(adapter, str) and adapter in ids:
            return ids[adapter]
        if adapter not in ids.values():
            raise InvalidArgumentError(self._unknown(adapter))
        return int(adapter)

    def _refuse_inside_step(self) -> None:
        # Whoever holds the lock may be waiting for that step to end.
        if self._core.is_called_here:
            raise InvalidArgumentError(
                "adapters are loaded and unloaded between steps, and this call comes from inside one (a logits "
                "processor or the executor); call it from another thread"
            )

    def _unknown(self, adapter: str | int) -> str:
        loaded = ", ".join(f"{name!r} (id {value})" for name, value in self.ids.items()) or "none"
        return f"there is no adapter {adapter!r}, loaded are: {loaded}; load it with load_adapter(name, path)"
