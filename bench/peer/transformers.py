"""transformers' generate() on torch, in float32 and bfloat16, as a script uses it: many requests are one padded batch.

It runs in this environment, which has torch for the tests. A batch is padded on the left to its longest prompt and runs
until its longest output is done; a request's tokens count when the step that made them ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .environment import child_command, num_values
from .session import Record, Request, Run, installed, serve

NAME = "transformers"
VARIANTS = ("fp32", "bf16")


def install(work: Path, log: Path) -> None:
    """Do nothing: torch and transformers are among the tests' requirements."""


def convert(checkpoint: Path, work: Path, variant: str) -> Path:
    """Return the checkpoint: transformers reads it as it is."""
    return checkpoint


def weight_bytes(model: Path, variant: str) -> int:
    """Return the bytes of the weights once they are loaded: 4 or 2 a value."""
    return num_values(model) * {"fp32": 4, "bf16": 2}[variant]


def command(work: Path, checkpoint: Path, variant: str, threads: int) -> list[str]:
    """Return the command of a session."""
    return child_command(sys.executable, "transformers", checkpoint.resolve(), variant, str(threads))


def load(checkpoint: str, variant: str, threads: int) -> Run:
    """Return what runs requests as one batch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[variant]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()

    class Recorder(BaseStreamer):
        """Called with the prompts first, then with the ids of each step."""

        def __init__(self, requests: list[Request], record: Record) -> None:
            self.left = [request["output_len"] for request in requests]
            self.record = record
            self.prompts_seen = False

        def put(self, value: torch.Tensor) -> None:
            if not self.prompts_seen:
                self.prompts_seen = True
                return
            for idx, token_id in enumerate(value.tolist()):
                if self.left[idx] > 0:
                    self.left[idx] -= 1
                    self.record(idx, [token_id])

        def end(self) -> None:
            pass

    def run(requests: list[Request], record: Record) -> None:
        longest = max(len(request["prompt_ids"]) for request in requests)
        steps = max(request["output_len"] for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            count = len(request["prompt_ids"])
            ids[row, longest - count :] = torch.tensor(request["prompt_ids"])
            mask[row, longest - count :] = 1
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                streamer=Recorder(requests, record),
            )

    return run


if __name__ == "__main__":
    serve(
        lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])),
        lambda: installed("transformers", "?"),
    )
