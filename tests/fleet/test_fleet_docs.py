"""docs/fleet.md: its example is a fleet, its tables have every field, its pipelines are YAML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from plansmith.cli._app import GROUPS
from plansmith.fleet.engines import engines_of
from plansmith.fleet.fleet_file import read_fleet
from plansmith.fleet.schema_check import schema

TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text("utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_is_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "plansmith.yaml").write_text(BLOCKS[0])
    fleet = read_fleet(tmp_path)
    engines = {one.name: [sku.name for sku in one.skus] for one in engines_of(fleet)}
    assert engines == {
        "smol-int8": ["cpu", "l4"],
        "smol-int8-l40s": ["l40s"],
        "smol-fp16": ["l4", "a100-80g", "h100"],
    }
    assert all(f"engines/{name}" in TEXT for name in ("smol-int8", "smol-int8-l40s"))


@pytest.mark.parametrize("kind", ["", "model", "recipe", "sku", "engine", "limits"])
def test_every_field_is_described(kind: str) -> None:
    node = schema()["$defs"][kind] if kind else schema()
    for field in node["properties"]:
        assert f"`{field}`" in TEXT, field


def test_pipelines_are_yaml() -> None:
    for block in BLOCKS:
        assert isinstance(yaml.safe_load(block), dict)
    github = yaml.safe_load(BLOCKS[1])["jobs"]
    assert github["build"]["needs"] == "plan"
    assert set(github["plan"]["outputs"]) == {"any", "matrix"}


def test_commands_are_there() -> None:
    commands = set(re.findall(r"plansmith fleet ([a-z]+)", TEXT))
    assert {"plan", "status", "matrix", "build"} <= commands <= set(GROUPS["fleet"][1])
