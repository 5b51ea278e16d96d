"""Kernels compiled ahead of time, launched through the driver as an engine does, against exact references.

The cubins are those that bench/gpu/pack.sh compiled and carried, if of the same sources; else they are compiled here.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import check_kv_write
import torch
from attention_problem import Case, Problem, bound, relative_errors
from bench_device import Device
from cubin_launch import CubinLauncher, source_key
from finding import Findings
from plansmith.plugins import aot, bundle, catalog
from plansmith.plugins.kernel import Kernel
from plansmith.plugins.kv_write import run as kv_run
from plansmith.plugins.kv_write import spec as kv_spec
from plansmith.plugins.paged_attention import run as attention_run
from plansmith.plugins.paged_attention import spec as attention_spec
from plansmith.plugins.sampling import run as sampling_run
from plansmith.plugins.sampling import spec as sampling_spec
from plansmith.runtime.executors import kernel_bundle
from sampling_problem import KINDS, SamplingProblem

CARRIED = Path(os.environ.get("PLANSMITH_ROOT", ".")) / "build" / "gpu" / "kernels"


def run(device: Device, findings: Findings) -> None:
    """Load every cubin of the catalog and run each operation through them."""
    with tempfile.TemporaryDirectory() as scratch:
        kernels = chosen_kernels(device)
        launcher = CubinLauncher(open_bundle(device, findings, kernels, Path(scratch)), device.dry_run)
        attention(device, findings, launcher)
        sampling(device, findings, launcher)
        kv_write(device, findings, launcher)
        findings.note(
            "launches", f"{launcher.launched} " + device.pick("through the driver", "laid out, interpreted")
        )


def chosen_kernels(device: Device) -> list[Kernel]:
    """Return the catalog for this GPU; in a dry run the few that its cases launch, since each takes seconds."""
    kernels = catalog.catalog(device.sm())
    if not device.dry_run:
        return kernels
    few = attention_spec.Attention("fp16", "same", 8, 1, 64, sm=device.sm())
    greedy = sampling_spec.steps(1, 700, sampled=False, filtered=False, logprobs=False)
    return [
        kv_spec.kernel(kv_spec.KvWrite("fp16", "fp8", 4, 2, 64)),
        attention_spec.decode_kernel(few),
        attention_spec.combine_kernel(few),
        *(step.kernel for step in greedy),
    ]


def open_bundle(
    device: Device, findings: Findings, kernels: list[Kernel], scratch: Path
) -> kernel_bundle.KernelBundle:
    """Return the carried bundle, or one compiled now."""
    folder, key = CARRIED, source_key(kernels)
    if device.dry_run or carried_key() != key:
        folder = scratch / "kernels"
        bundle.write_bundle(folder, compiled(device, findings, kernels), aot.triton_version(), key)
    loaded = kernel_bundle.load(folder, device.sm())
    where = "carried" if folder == CARRIED else "compiled here"
    findings.note("bundle", f"{len(loaded.kernels)} kernels, triton {loaded.entry.triton_version}, {where}")
    return loaded


def carried_key() -> str | None:
    """Return what the carried cubins were made of, None where none are carried."""
    if not (CARRIED / kernel_bundle.BUNDLE_NAME).exists():
        return None
    return kernel_bundle.read_bundle(CARRIED).key


def compiled(device: Device, findings: Findings, kernels: list[Kernel]) -> list[aot.CompiledKernel]:
    """Return the kernels compiled for this GPU; an operation with one that does not compile is wrong and left out."""
    made: list[aot.CompiledKernel] = []
    for op in sorted({kernel.op for kernel in kernels}):
        with findings.guarded(f"{op}: compiling"):
            made += aot.compile_kernels([kernel for kernel in kernels if kernel.op == op], [device.sm()])
    return made


def attention(device: Device, findings: Findings, launcher: CubinLauncher) -> None:
    """Run decode with several splits, and prefill, for each type, pool and head size that is compiled."""
    chance = random.Random(device.seed)
    for dtype in device.dtypes():
        for kv in device.pick(("same", "fp8", "int8"), ("same",)):
            for head_dim in device.pick((64, 128, 256), (64,)):
                for step in device.pick(("decode", "mixed"), ("decode",)):
                    case = attention_case(device, chance, dtype, kv, head_dim, step)
                    with findings.guarded(f"attention {step}: {case}"):
                        problem = Problem(device, case)
                        with launcher.instead_of_jit(attention_run):
                            got = problem.attend()
                        worst = relative_errors(got, problem.exact(), head_dim)
                        findings.close(
                            f"attention {step}: {case}",
                            worst,
                            torch.zeros_like(worst),
                            bound(case.attention.dtype),
                        )


def sampling(device: Device, findings: Findings, launcher: CubinLauncher) -> None:
    """Draw rows of every kind; the tokens have to be the rule's, bit for bit."""
    kinds = device.pick(list(KINDS) * 2, ["greedy"])
    vocab_size = device.pick(32000, 700)
    case = f"sampling, {vocab_size} tokens, {len(kinds)} rows"
    with findings.guarded(case):
        problem = SamplingProblem(device, kinds, vocab_size, device.seed)
        with launcher.instead_of_jit(sampling_run):
            got = problem.sample()
        findings.equal(case, got[:, 0], problem.tokens())


def kv_write(device: Device, findings: Findings, launcher: CubinLauncher) -> None:
    """Write a step's K and V into pools of each kind; codes and numbers have to be the reference's."""
    for dtype in device.dtypes():
        for kv in device.pick(("same", "fp8", "int8"), ("fp8",)):
            for head_dim in device.pick((64, 128, 256), (64,)):
                heads = device.pick((32, 8), (4, 2))
                write = kv_spec.KvWrite(dtype, kv, *heads, head_dim)  # type: ignore[arg-type]
                case = f"kv_write: {dtype}, {kv} KV x {head_dim}"
                with findings.guarded(case), launcher.instead_of_jit(kv_run):
                    check_kv_write.check(device, findings, case, write, [5, 1, 0, 20], [9, 30, 0, 20], 16)


def attention_case(
    device: Device, chance: random.Random, dtype: str, kv: str, head_dim: int, step: str
) -> Case:
    """Return a step with sequences of every length, of rows as `step` has them."""
    longest = device.pick(2500, 300)
    kv_lens = (*(chance.randint(1, longest) for _ in range(3)), 0, longest)
    most = {"decode": 1, "mixed": 200}[step]
    query_lens = tuple(chance.randint(1, min(most, length)) if length else 0 for length in kv_lens)
    heads = device.pick((32, 8), (8, 1))
    made = attention_spec.Attention(dtype, kv, *heads, head_dim, sm=device.sm())  # type: ignore[arg-type]
    return Case(made, query_lens, kv_lens, block_size=device.pick(64, 16), split_len=device.pick(512, 128))
