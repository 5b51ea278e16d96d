"""Beam search against transformers' generate(num_beams=...): the same beams in the same order, with the same scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.engine import Completion, Engine, SamplingParams
from plansmith.runtime.errors import InvalidArgumentError, OutOfMemoryError
from tiny_engines import LIMITS

GetPath = Callable[..., Path]
FAMILIES = ["llama", "qwen2", "gemma3", "phi3"]
SHORT = [1, 5, 9, 33]
LONG = [(7 * i + 3) % 320 for i in range(61)]  # several chunks of the 16 tokens that a step takes here
PROMPTS = [SHORT, [77], [8] * 9, LONG]
SMOLLM2 = Path(__file__).parents[2] / "demo" / "smollm2"
SCORE_TOLERANCE = 2e-4  # of a sum of some ten float32 log-probabilities, computed by two programs


@dataclasses.dataclass(frozen=True)
class Scored:
    """One beam: its output and sum of log-probabilities / length ** length_penalty."""

    token_ids: tuple[int, ...]
    score: float


class Reference:
    """transformers' model of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # Only what a test asks for may end a beam.
        self.model.generation_config.eos_token_id = None

    def beams(
        self, prompt: Sequence[int], width: int, end_ids: Sequence[int] = (), **kwargs: Any
    ) -> list[Scored]:
        """Return the beams of generate(), best first, without its padding."""
        ids = self._torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=list(end_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **kwargs,
        )
        lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
        outputs = [
            tuple(row[len(prompt) :][:n]) for row, n in zip(out.sequences.tolist(), lengths, strict=True)
        ]
        scores = out.sequences_scores.tolist()
        return [Scored(tokens, score) for tokens, score in zip(outputs, scores, strict=True)]

    def greedy(self, prompt: Sequence[int], **kwargs: Any) -> list[int]:
        """Return the output of greedy generate()."""
        ids = self._torch.tensor([list(prompt)])
        mask = self._torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **kwargs)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: GetPath) -> Callable[[str], Reference]:
    """Return family -> its transformers model, loaded once."""
    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(tiny_checkpoint(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def engine(tiny_engine: GetPath) -> Iterator[Callable[[str], Engine]]:
    """Return family -> its engine, with small steps, opened once."""
    made: dict[str, Engine] = {}

    def get(family: str) -> Engine:
        if family not in made:
            made[family] = Engine.open(tiny_engine(family), num_threads=1, max_num_tokens=16)
        return made[family]

    yield get
    for one in made.values():
        one.close()


def params(width: int, max_tokens: int = 12, **kwargs: Any) -> SamplingParams:
    return SamplingParams(
        beam_width=width, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kwargs
    )


def scored(completion: Completion, length_penalty: float) -> list[Scored]:
    found = []
    for i, one in enumerate(completion.outputs):
        assert one.index == i and one.cumulative_logprob is not None
        found.append(Scored(one.token_ids, one.cumulative_logprob / len(one.token_ids) ** length_penalty))
    return found


def check(ours: Sequence[Scored], theirs: Sequence[Scored], compare_scores: bool = True) -> None:
    """Compare beam by beam; where the scores of neighbours are closer than float32 can tell, in any order."""
    assert len(ours) == len(theirs)
    if compare_scores:
        assert [b.score for b in ours] == pytest.approx(
            [b.score for b in theirs], abs=SCORE_TOLERANCE, rel=1e-4
        )
    for i, beam in enumerate(ours):
        level = [b.token_ids for b in theirs if abs(b.score - theirs[i].score) <= SCORE_TOLERANCE]
        assert beam.token_ids in level, f"beam {i} of {len(ours)}"


def frequent_tokens(beams: Sequence[Scored], count: int) -> list[int]:
    """Return tokens that the search comes across early: as end ids they make it end at many lengths."""
    seen: dict[int, None] = {}
    for position in range(2, len(beams[0].token_ids)):
        for beam in beams:
            seen.setdefault(beam.token_ids[position], None)
    return list(seen)[:count]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_every_width(
    family: str, width: int, reference: Callable[[str], Reference], engine: Callable[[str], Engine]
) -> None:
    """Without an end id, prompts of one token and of several chunks, four searches sharing the steps."""
    completions = engine(family).generate(PROMPTS, params(width))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        check(scored(completion, 1.0), reference(family).beams(prompt, width, max_new_tokens=12))
        assert {one.finish_reason for one in completion.outputs} == {"length"}


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("num_end_ids", [1, 3])
def test_beams_that_end(
    num_end_ids: int,
    length_penalty: float,
    early_stopping: bool | str,
    reference: Callable[[str], Reference],
    engine: Callable[[str], Engine],
) -> None:
    """Hypotheses of different lengths, ranked by every length penalty, stopped by every rule."""
    lengths = set()
    for family, width in (("llama", 3), ("gemma3", 4)):
        theirs = reference(family)
        for prompt in (SHORT, LONG):
            ends = frequent_tokens(theirs.beams(prompt, width, max_new_tokens=12), num_end_ids)
            kwargs: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
            (completion,) = engine(family).generate(
                [prompt], params(width, 20, stop_token_ids=ends, **kwargs)
            )
            check(
                scored(completion, length_penalty),
                theirs.beams(prompt, width, ends, max_new_tokens=20, **kwargs),
            )
            for one in completion.outputs:
                assert (one.finish_reason == "stop") == (one.token_ids[-1] in ends)
                assert not set(one.token_ids[:-1]) & set(ends)
                lengths.add(len(one.token_ids))
    # A penalty of 2 makes the longest the best.
    assert len(lengths) > 2 or length_penalty == 2.0, "the end ids must matter"


def test_min_tokens_forbids_the_end_ids(
    reference: Callable[[str], Reference], engine: Callable[[str], Engine]
) -> None:
    theirs = reference("llama")
    ends = frequent_tokens(theirs.beams(SHORT, 4, max_new_tokens=12), 2)
    (completion,) = engine("llama").generate([SHORT], params(4, 16, stop_token_ids=ends, min_tokens=7))
    check(scored(completion, 1.0), theirs.beams(SHORT, 4, ends, max_new_tokens=16, min_new_tokens=7))
    assert min(len(one.token_ids) for one in completion.outputs) > 7 - 1


def test_repetition_penalty_and_bad_words_see_each_beams_own_history(
    reference: Callable[[str], Reference], engine: Callable[[str], Engine]
) -> None:
    """The penalty acts on log-probabilities, as in transformers. Same tokens; our scores are the model's own."""
    theirs = reference("llama")
    free = theirs.beams(SHORT, 4, max_new_tokens=12)
    banned = [list(free[0].token_ids[3:5]), [free[1].token_ids[-1]]]
    (completion,) = engine("llama").generate([SHORT], params(4, 12, repetition_penalty=1.3, bad_words=banned))
    wanted = theirs.beams(SHORT, 4, max_new_tokens=12, repetition_penalty=1.3, bad_words_ids=banned)
    assert [b.token_ids for b in wanted] != [b.token_ids for b in free]
    check(scored(completion, 1.0), wanted, compare_scores=False)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 3])
def test_no_repeated_ngrams_as_in_transformers(
    width: int, size: int, reference: Callable[[str], Reference], engine: Callable[[str], Engine]
) -> None:
    """Greedy and beams, over prompt and output; a tiny model repeats itself at once without it."""
    theirs = reference("llama")
    own = params(width, 40, no_repeat_ngram_size=size, temperature=0.0)
    repeating = [5, 9, 5, 9, 5]
    completions = engine("llama").generate([repeating, LONG], own)
    for prompt, completion in zip([repeating, LONG], completions, strict=True):
        kwargs: dict[str, Any] = {"max_new_tokens": 40, "no_repeat_ngram_size": size}
        if width == 1:
            assert list(completion.token_ids) == theirs.greedy(prompt, **kwargs)
        else:
            check(scored(completion, 1.0), theirs.beams(prompt, width, **kwargs), compare_scores=False)
        text = [*prompt, *completion.token_ids]
        ngrams = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        own_ngrams = ngrams[len(prompt) - size + 1 :]
        assert len({*own_ngrams}) == len(own_ngrams) and not {*own_ngrams} & {
            *ngrams[: len(prompt) - size + 1]
        }


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_little_memory_changes_nothing(
    policy: str, engine: Callable[[str], Engine], tiny_engine: GetPath
) -> None:
    """Twelve searches and other requests in a pool for one of them: pauses begin again from the prompt."""
    work: list[tuple[list[int], SamplingParams]] = []
    for i in range(12):
        work.append((PROMPTS[i % 4], params(2 + i % 2, 30 + i)))
        work.append(([i + 1] * (i + 2), SamplingParams(max_tokens=40, seed=i, ignore_eos=True)))
    calm = engine("llama")
    wanted = [calm.generate([prompt], p)[0] for prompt, p in work]
    block_bytes = calm.model_info.kv_bytes_per_block
    shared = len(LONG) // LIMITS["tokens_per_block"]
    longest = (len(LONG) + 41) // LIMITS["tokens_per_block"] + 1
    blocks = shared + 3 * (longest - shared)
    with Engine.open(
        tiny_engine("llama"),
        num_threads=1,
        max_num_tokens=16,
        scheduler_policy=policy,
        kv_cache_bytes=blocks * block_bytes,
    ) as crowded:
        handles = [crowded.submit(prompt, p) for prompt, p in work]
        completions = [handle.result() for handle in handles]
        stats = crowded.stats()
    searches = completions[::2]
    assert any(one.stats.num_pauses > 0 for one in searches) == (policy == "max_utilization")
    assert stats.used_num_blocks == 0
    for ours, alone in zip(completions, wanted, strict=True):
        assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in alone.outputs]
        assert [o.cumulative_logprob for o in ours.outputs] == [o.cumulative_logprob for o in alone.outputs]


def test_a_cancelled_search_gives_its_beams_so_far(tiny_engine: GetPath) -> None:
    with Engine.open(tiny_engine("llama"), num_threads=1, manual_step=True) as engine:
        handle = engine.submit(SHORT, params(3, 40))
        for _ in range(5):
            engine.step()
        handle.cancel()
        while engine.step():
            pass
        outputs = handle.result().outputs
        assert [len(one.token_ids) for one in outputs] == [5, 5, 5]
        assert len({one.token_ids for one in outputs}) == 3
        assert {one.finish_reason for one in outputs} == {"cancelled"}
        assert engine.stats().used_num_blocks == 0
        before_its_first = engine.submit(LONG, params(3, 40))
        before_its_first.cancel()
        while engine.step():
            pass
        assert before_its_first.result().finish_reason == "cancelled"


def test_one_token_and_beams_of_the_whole_vocabulary(
    reference: Callable[[str], Reference], engine: Callable[[str], Engine]
) -> None:
    (completion,) = engine("llama").generate([SHORT], params(5, 1))
    check(scored(completion, 1.0), reference("llama").beams(SHORT, 5, max_new_tokens=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.7},
        {"top_p": 0.5},
        {"n": 2},
        {"max_draft_len": 3},
        {"beam_search_diversity_rate": -1.0},
        {"early_stopping": "soon"},
        {"length_penalty": float("nan")},
        {"return_generation_logits": True},
    ],
)
def test_what_does_not_go_with_beams_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        params(2, **wrong)


def test_more_beams_than_the_engine_has_sequences_for(engine: Callable[[str], Engine]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"beam_width is 9, wanted 1 .*\(8\)"):
        engine("llama").generate([SHORT], params(9))


def test_beams_that_can_never_fit_are_refused(tiny_engine: GetPath) -> None:
    with Engine.open(tiny_engine("llama"), num_threads=1) as engine:
        block_bytes = engine.model_info.kv_bytes_per_block
    with (
        Engine.open(tiny_engine("llama"), num_threads=1, kv_cache_bytes=12 * block_bytes) as engine,
        pytest.raises(OutOfMemoryError, match="blocks"),
    ):
        engine.generate([SHORT], params(4, 60))


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="`make demo` has not fetched the checkpoint")
@pytest.mark.parametrize("width", [2, 4])
def test_smollm2(width: int, tmp_path: Path) -> None:
    """A real model, with its own end id, over a text prompt."""
    import transformers
    from plansmith.builder.build import build_engine, plan_build

    limits = {"max_batch_size": 8, "max_num_tokens": 64, "max_input_len": 192, "max_seq_len": 256}
    build_engine(plan_build(SMOLLM2, ["cpu"], precision="fp32", limits=limits), tmp_path / "engine")
    prompt = transformers.AutoTokenizer.from_pretrained(SMOLLM2)("The capital of France is").input_ids
    theirs = Reference(SMOLLM2)
    with Engine.open(tmp_path / "engine") as engine:
        for ends in ([], list(engine.eos_token_ids), [30]):  # 30 = "."
            for length_penalty in (0.0, 1.0):
                (completion,) = engine.generate(
                    [prompt], params(width, 24, stop_token_ids=ends, length_penalty=length_penalty)
                )
                wanted = theirs.beams(prompt, width, ends, max_new_tokens=24, length_penalty=length_penalty)
                check(scored(completion, length_penalty), wanted)
