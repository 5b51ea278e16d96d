"""plansmith.yaml: which engines a fleet has, read and checked; docs/fleet.md says what every field means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..builder.precision import PRECISIONS, RECIPES
from ..builder.targets.registry import Target, target_names
from ..runtime.errors import Error, InvalidArgumentError
from ..sizing.skus import Sku
from .places import is_url
from .schema_check import check_schema, nearest, spot_text
from .sku_targets import resolve
from .yaml_lines import Document, Spot, read_yaml

FILE_NAME = "plansmith.yaml"
DEFAULT_STORE = ".plansmith/store"
DEFAULT_OUTPUT = "engines"
DEFAULT_RUNNER = "default"


@dataclasses.dataclass(frozen=True)
class Given:
    """A limit, and where it is given: "plansmith.yaml:12"."""

    value: int
    where: str


GivenLimits = Mapping[str, Given]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that engines are made of.

    tokenizer : where its tokenizer is; None = in the checkpoint
    revision : the fingerprint that it must have; None = any
    where : the line that names it
    """

    path: Path
    tokenizer: Path | None
    revision: str | None
    where: str


@dataclasses.dataclass(frozen=True)
class FleetModel:
    """A model. quantized : recipe -> the checkpoint that is taken instead."""

    name: str
    source: Source
    quantized: Mapping[str, Source]
    limits: GivenLimits

    def source_for(self, recipe: str) -> Source:
        """Return the checkpoint that a recipe is built of."""
        return self.quantized.get(recipe, self.source)


@dataclasses.dataclass(frozen=True)
class FleetRecipe:
    """A recipe; fields as `plansmith build` takes them. lines : where each is given, "" the recipe itself."""

    name: str
    precision: str
    group_size: int | None
    draft: str | None
    kv_cache_dtype: str
    weight_streaming: bool
    gate: str | None
    limits: GivenLimits
    lines: Mapping[str, str]

    def where(self, field: str) -> str:
        """Return the line of a field, or of the recipe where it is not given."""
        return self.lines.get(field, self.lines[""])


@dataclasses.dataclass(frozen=True)
class FleetSku:
    """An SKU and what is built for it.

    gpu : what is known of it; None for cpu and where only a target was named
    has_limits : whether it has limits of its own, and so an engine
    """

    name: str
    target: Target
    gpu: Sku | None
    limits: GivenLimits
    has_limits: bool
    runner: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class EngineChoice:
    """An entry of `engines`: the models at the recipes for the SKUs. name : the engine's; "" = the usual one."""

    name: str
    models: tuple[str, ...]
    recipes: tuple[str, ...]
    skus: tuple[str, ...]
    limits: GivenLimits
    where: str


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A fleet file, checked: every name in it leads somewhere.

    path : of the file; paths in it are relative to its folder, and absolute here
    store : a folder, or a URL
    output : the folder of the engine directories
    runners : target or "default" -> labels
    """

    path: Path
    name: str
    store: str
    output: Path
    trust: tuple[str, ...]
    limits: GivenLimits
    models: Mapping[str, FleetModel]
    recipes: Mapping[str, FleetRecipe]
    skus: Mapping[str, FleetSku]
    engines: tuple[EngineChoice, ...]
    runners: Mapping[str, tuple[str, ...]]


def read_fleet(path: str | Path = FILE_NAME) -> Fleet:
    """Return the fleet of a file; no checkpoint is looked at.

    raises InvalidArgumentError naming the file, the line, what is there, what was wanted and what to do
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    document = read_yaml(path, str(path))
    check_schema(document)
    return _Reader(document, path.absolute().parent).fleet(path.absolute())


class _Reader:
    """Takes a fleet out of a document that is as the schema has it."""

    def __init__(self, document: Document, folder: Path) -> None:
        self._document = document
        self._folder = folder
        self._top: dict[str, Any] = document.value

    def fleet(self, path: Path) -> Fleet:
        top = self._top
        recipes = {name: self._recipe(name, one) for name, one in _named(top["recipes"]).items()}
        models = {name: self._model(name, one, recipes) for name, one in top["models"].items()}
        skus = {name: self._sku(name, one or {}) for name, one in _named(top["skus"]).items()}
        return Fleet(
            path=path,
            name=top["name"],
            store=self._store(),
            output=self._path(top.get("output", DEFAULT_OUTPUT)),
            trust=tuple(top.get("trust", ())),
            limits=self._limits(top, ()),
            models=models,
            recipes=recipes,
            skus=skus,
            engines=self._engines(models, recipes, skus),
            runners=self._runners(skus),
        )

    def _runners(self, skus: Mapping[str, FleetSku]) -> dict[str, tuple[str, ...]]:
        """Return labels by target; a name that no unit would ever ask for is refused."""
        given = self._top.get("runners", {})
        known = dict.fromkeys((DEFAULT_RUNNER, *target_names()))
        for name in given:
            if name in skus and name not in known:
                where, target = self._document.where(("runners", name)), skus[name].target.name
                raise InvalidArgumentError(
                    f"{where}: runners has {name!r}, which is an SKU of the fleet; runners go by target, so call it "
                    f"{target}, or give its labels as skus.{name}.runner"
                )
        self._known(given, known, ("runners",), "target")
        return {name: _list(labels) for name, labels in given.items()}

    def _store(self) -> str:
        text = str(self._top.get("store", DEFAULT_STORE))
        return text if is_url(text, f"{self._document.where(('store',))}: store") else str(self._path(text))

    def _path(self, text: str) -> Path:
        try:
            return self._folder / Path(text).expanduser()
        except RuntimeError:
            raise InvalidArgumentError(
                f"{self._document.name}: {text!r} begins with the home directory of a user that is not known here; "
                "give the path itself"
            ) from None

    def _limits(self, value: Mapping[str, Any], spot: Spot) -> GivenLimits:
        """Return the limits that a mapping has."""
        return {
            name: Given(int(one), self._document.where((*spot, "limits", name)))
            for name, one in value.get("limits", {}).items()
        }

    def _model(self, name: str, value: Any, recipes: Mapping[str, Any]) -> FleetModel:
        spot = ("models", name)
        source = self._source(value, spot, None)
        fields = value if isinstance(value, dict) else {}
        self._known(fields.get("quantized", {}), recipes, (*spot, "quantized"), "recipe of the fleet")
        quantized = {
            recipe: self._source(one, (*spot, "quantized", recipe), source.tokenizer)
            for recipe, one in fields.get("quantized", {}).items()
        }
        return FleetModel(name, source, quantized, self._limits(fields, spot))

    def _source(self, value: Any, spot: Spot, tokenizer: Path | None) -> Source:
        fields = value if isinstance(value, dict) else {"checkpoint": value}
        if "tokenizer" in fields:
            tokenizer = self._path(fields["tokenizer"])
        where = self._document.where((*spot, "checkpoint"))
        return Source(self._path(fields["checkpoint"]), tokenizer, fields.get("revision"), where)

    def _recipe(self, name: str, value: Any) -> FleetRecipe:
        spot, fields = ("recipes", name), value or {}
        lines = {field: self._document.where((*spot, field)) for field in fields}
        lines[""] = self._document.where(spot if isinstance(self._top["recipes"], dict) else self._item(name))
        precision = str(fields.get("precision", name))
        known = ("auto", *PRECISIONS, *RECIPES)
        if precision not in known:
            where, at = lines.get("precision", lines[""]), spot_text(spot)
            what = f"{at}.precision is {precision!r}" if "precision" in fields else f"{at} has no precision"
            raise InvalidArgumentError(
                f"{where}: {what}, and {precision!r} is none; {nearest(precision, known)}Give one of {', '.join(known)}"
            )
        return FleetRecipe(
            name=name,
            precision=precision,
            group_size=fields.get("group_size"),
            draft=None if fields.get("draft", "none") == "none" else fields["draft"],
            kv_cache_dtype=fields.get("kv_cache_dtype", "auto"),
            weight_streaming=fields.get("weight_streaming", False),
            gate=fields.get("gate"),
            limits=self._limits(fields, spot),
            lines=lines,
        )

    def _item(self, name: str) -> Spot:
        return ("recipes", self._top["recipes"].index(name))

    def _sku(self, name: str, fields: Mapping[str, Any]) -> FleetSku:
        listed = isinstance(self._top["skus"], list)
        spot: Spot = ("skus", self._top["skus"].index(name) if listed else name)
        try:
            found = resolve(name, fields.get("target"), fields.get("compiler"))
        except Error as error:
            raise type(error)(f"{self._document.where(spot)}: {error}") from None
        limits = self._limits(fields, spot)
        runner = _list(fields.get("runner", ()))
        return FleetSku(name, found.target, found.gpu, limits, bool(limits), runner)

    def _engines(
        self, models: Mapping[str, Any], recipes: Mapping[str, Any], skus: Mapping[str, Any]
    ) -> tuple[EngineChoice, ...]:
        if "engines" not in self._top:
            where = self._document.where(("models",))
            return (EngineChoice("", tuple(models), tuple(recipes), tuple(skus), {}, where),)
        return tuple(
            self._engine(one, ("engines", idx), models, recipes, skus)
            for idx, one in enumerate(self._top["engines"])
        )

    def _engine(
        self,
        fields: Mapping[str, Any],
        spot: Spot,
        models: Mapping[str, Any],
        recipes: Mapping[str, Any],
        skus: Mapping[str, Any],
    ) -> EngineChoice:
        chosen = {}
        for field, known in (("model", models), ("recipe", recipes), ("skus", skus)):
            chosen[field] = _list(fields.get(field, tuple(known)))
            kind = "SKU" if field == "skus" else field
            self._known(chosen[field], known, (*spot, field), f"{kind} of the fleet")
        if "name" in fields and len(chosen["model"]) * len(chosen["recipe"]) > 1:
            raise InvalidArgumentError(
                f"{self._document.where((*spot, 'name'))}: {spot_text(spot)} has one name for several engines; leave "
                "the name out, or make an entry for each"
            )
        limits, where = self._limits(fields, spot), self._document.where(spot)
        name = str(fields.get("name", ""))
        return EngineChoice(name, chosen["model"], chosen["recipe"], chosen["skus"], limits, where)

    def _known(self, names: Iterable[str], known: Mapping[str, Any], spot: Spot, kind: str) -> None:
        """Refuse a name that leads nowhere."""
        for idx, name in enumerate(names):
            if name not in known:
                inner = next(
                    (one for one in ((*spot, name), (*spot, idx)) if one in self._document.lines), spot
                )
                raise InvalidArgumentError(
                    f"{self._document.where(inner)}: {spot_text(spot)} has {name!r}, which is no {kind}; "
                    f"{nearest(name, known)}There are {', '.join(known)}"
                )


def _named(value: Any) -> dict[str, Any]:
    """Return a list of names as a mapping of them to nothing."""
    return value if isinstance(value, dict) else dict.fromkeys(value)


def _list(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
