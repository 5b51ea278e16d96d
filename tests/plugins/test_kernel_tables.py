"""docs/kernels.md is what the catalog and the measured resources say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from plansmith.plugins.catalog import catalog

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import kernel_tables  # noqa: E402 - it lies in tools/


def report() -> dict[str, Any]:
    """Return what `make kernels` could have measured."""
    facts = {
        "num_warps": 4,
        "registers": 96,
        "shared_bytes": 2048,
        "stack_bytes": 0,
        "static_shared_bytes": 1024,
        "spill_store_bytes": 0,
        "spill_load_bytes": 8,
    }
    rows = [
        {"op": kernel.op, "name": kernel.name, "sm": sm, **facts} for sm in (80, 86, 90) for kernel in catalog(sm)
    ]  # fmt: skip
    return {"triton_version": "3.9.0", "seconds": 1.0, "kernels": rows}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the tool write into tmp_path."""
    page = tmp_path / "kernels.md"
    page.write_text((ROOT / "docs" / "kernels.md").read_text())
    monkeypatch.setattr(kernel_tables, "_PAGE", page)
    monkeypatch.setattr(kernel_tables, "_RESULTS", tmp_path / "kernels.json")
    (tmp_path / "resources.json").write_text(json.dumps(report()))
    return tmp_path


def test_tables_are_of_all_kernels(files: Path) -> None:
    assert kernel_tables.main(["--from", str(files / "resources.json")]) == 0
    page = (files / "kernels.md").read_text()
    for kernel in (*catalog(80), *catalog(90)):
        assert f"| `{kernel.name}` |" in page
    assert "| `sampling_scan` | 4 | 96 | 3072 | 8 | 4 | 96 | 3072 | 8 |" in page
    count = len(catalog(86))
    assert f"| sm86 | {count} | 96 | 3 KiB | {count} |" in page
    # 64 sequences of 4096 positions, K and V of 8 heads of 128 fp16 numbers, are 1 GiB; q and out 1 MiB.
    assert f"| `paged_attention` | decode, fp16 pools | {(1 << 30) + (1 << 20):,} |" in page
    assert kernel_tables.main(["--check"]) == 0


def test_a_stale_page_or_catalog_is_an_error(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_tables.main(["--from", str(files / "resources.json")])
    page = files / "kernels.md"
    page.write_text(page.read_text().replace("| 96 |", "| 95 |", 1))
    assert kernel_tables.main(["--check"]) == 1
    assert "docs/kernels.md is not what" in capsys.readouterr().out
    assert kernel_tables.main([]) == 0 and kernel_tables.main(["--check"]) == 0
    monkeypatch.setattr(kernel_tables, "catalog", lambda sm: catalog(sm)[1:])
    assert kernel_tables.main(["--check"]) == 1
    assert "is not the catalog's (" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--check"], [], ["--from", "none.json"], ["--from", "other.json"]])
def test_a_report_that_is_not_there_or_none_is_one_sentence(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(files)
    (files / "other.json").write_text("{}")
    assert kernel_tables.main(arguments) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"error: \S+ cannot be read \((No such file|it is no report).*\); run make kernels, .*\n", said
    )


def test_the_page_is_not_stale() -> None:
    assert kernel_tables.main(["--check"]) == 0, "run make kernels"
