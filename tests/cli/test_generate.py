"""plansmith generate on a tiny engine."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.cli import _options
from plansmith.cli._terminal import terminal_text
from plansmith.runtime.engine import Engine, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
FLAGS = ("--max-tokens", 8, "--threads", 1)
MESSAGES = [{"role": "user", "content": "the quick fox"}]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Any:
    with Engine.open(engine_dir, num_threads=1) as opened:
        yield opened


def answer(engine: Engine, ids: list[int], params: SamplingParams = GREEDY, new_text: bool = True) -> str:
    return engine.generate([ids], params, new_text=new_text)[0].text


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((json.dumps(x) if not isinstance(x, str) else x) + "\n" for x in lines))
    return path


def read_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_prompt_goes_through_the_chat_template(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    result = plansmith("generate", engine_dir, "the quick fox", *FLAGS)
    assert (result.status, result.out) == (0, answer(engine, engine.chat_ids(MESSAGES)) + "\n")


def test_raw_continues_the_text(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    assert engine.tokenizer is not None
    result = plansmith("generate", engine_dir, "the quick fox", "--raw", *FLAGS)
    expected = answer(engine, engine.tokenizer.encode("the quick fox"), new_text=False)
    assert result.out == expected + "\n" != plansmith("generate", engine_dir, "the quick fox", *FLAGS).out


@pytest.mark.parametrize(
    "flag",
    [
        "--kv-cache-free-gpu-mem-fraction",
        "--kv_cache_free_gpu_mem_fraction",
        "--kv_cache_free_gpu_memory_fraction",  # trtllm-serve's and run.py's
    ],
)
def test_a_share_of_the_gpu_by_its_names(
    plansmith: Run, engine_dir: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, Any] = {}
    open_engine = _options.open_engine

    def note(*arguments: Any, **options: Any) -> Engine:
        opened.update(options)
        return open_engine(*arguments, **options)

    monkeypatch.setattr(_options, "open_engine", note)
    assert plansmith("generate", engine_dir, "the", flag, 0.25, *FLAGS).status == 0
    assert opened["kv_cache_free_gpu_mem_fraction"] == 0.25
    refused = plansmith("generate", engine_dir, "the", flag, 0, *FLAGS)
    assert (
        refused.status == 1
        and "kv_cache_free_gpu_mem_fraction is 0.0, it must be a number, above 0" in refused.err
    )
    assert plansmith("generate", engine_dir, "the", flag, 1.5, *FLAGS).status == 2


def test_system_and_template_variables(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    ids = engine.chat_ids([{"role": "system", "content": "be brief"}, *MESSAGES])
    result = plansmith("generate", engine_dir, "the quick fox", "--system", "be brief", *FLAGS)
    assert result.out == answer(engine, ids) + "\n"
    bare = engine.chat_ids(MESSAGES, add_generation_prompt=False)
    variable = ("--template-var", "add_generation_prompt=false")
    result = plansmith("generate", engine_dir, "the quick fox", *variable, *FLAGS)
    assert result.out == answer(engine, bare) + "\n"


def test_json_has_ids_reason_usage_and_logprobs(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    result = plansmith("generate", engine_dir, "the quick fox", "--json", "--logprobs", 2, *FLAGS)
    (expected,) = engine.generate([engine.chat_ids(MESSAGES)], GREEDY, new_text=True)
    fields = json.loads(result.out)
    assert fields["token_ids"] == list(expected.token_ids) and fields["text"] == expected.text
    assert fields["finish_reason"] == "length" and fields["usage"] == expected.usage
    assert [entry["token_id"] for entry in fields["logprobs"]] == fields["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in fields["logprobs"])


def test_sampling_flags_reach_the_engine(plansmith: Run, engine: Engine, engine_dir: Path) -> None:
    params = SamplingParams(
        max_tokens=20,
        temperature=0.9,
        top_k=30,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        seed=5,
        stop="zzz",
    )
    flags = (
        "--temperature 0.9 --top-k 30 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2 --seed 5 --stop zzz"
    )
    result = plansmith("generate", engine_dir, "the quick fox", "--max-tokens", 20, *flags.split())
    assert result.out == answer(engine, engine.chat_ids(MESSAGES), params) + "\n"


def test_without_max_tokens_the_sequence_may_fill_up(
    plansmith: Run, engine: Engine, engine_dir: Path
) -> None:
    result = plansmith("generate", engine_dir, "hi", "--json", "--ignore-eos")
    assert json.loads(result.out)["usage"]["total_tokens"] == engine.model_info.max_seq_len


def test_a_terminal_gets_no_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2J\x07b\tc\nd\x9bé"
    assert terminal_text(text) == text, "pytest's standard output is no terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal_text(text) == "a\ufffd[2J\ufffdb\tc\nd\ufffdé"


@pytest.mark.parametrize("argument", [(), ("-",)])
def test_a_prompt_from_standard_input(
    plansmith: Run,
    engine: Engine,
    engine_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick fox"))
    result = plansmith("generate", engine_dir, *argument, *FLAGS)
    assert result.out == answer(engine, engine.chat_ids(MESSAGES)) + "\n"


def test_a_file_runs_in_one_batch_and_keeps_its_order(
    plansmith: Run, engine: Engine, engine_dir: Path, tmp_path: Path
) -> None:
    assert engine.tokenizer is not None
    source = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": "the quick fox", "id": "a", "max_tokens": 20, "ignore_eos": True},
        {"messages": [{"role": "system", "content": "be brief"}, *MESSAGES]},
        "",
        {"prompt_ids": [5, 6, 7], "temperature": 0.8, "seed": 3, "logit_bias": {"9": -5}, "logprobs": 1},
    )
    target = tmp_path / "out.jsonl"
    result = plansmith("generate", engine_dir, "--input", source, "--output", target, *FLAGS)
    assert result.status == 0 and result.out == ""
    assert "3 of 3 prompts answered" in result.err
    lines = read_lines(target.read_text())
    assert [line["line"] for line in lines] == [1, 2, 4]
    assert [line.get("id") for line in lines] == ["a", None, None]
    longer = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logit_bias={9: -5.0}, logprobs=1)
    with_system = engine.chat_ids([{"role": "system", "content": "be brief"}, *MESSAGES])
    assert [line["text"] for line in lines] == [
        answer(engine, engine.chat_ids(MESSAGES), longer),
        answer(engine, with_system),
        answer(engine, [5, 6, 7], sampled, new_text=False),
    ]
    assert lines[0]["usage"]["completion_tokens"] == 20
    assert "logprobs" in lines[2] and "logprobs" not in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_many_lines_to_standard_output(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *({"prompt_ids": [i], "id": i} for i in range(3, 103)))
    result = plansmith("generate", engine_dir, "--input", source, "--max-tokens", 3)
    assert [line["id"] for line in read_lines(result.out)] == list(range(3, 103))


BAD_LINES = [
    ("not json", "not JSON"),
    ("[1]", "must be an object"),
    (
        {"text_input": "x", "max_tokens": 3},
        "it has 'text_input', 'max_tokens' and none of prompt, messages, prompt_ids",
    ),
    ({"text_input": "x"}, "'text_input' is called \"prompt\" here"),
    ({"question": "x"}, "it has 'question' and none of prompt, messages, prompt_ids; give exactly one"),
    ({"id": 3}, "it has no fields and none of prompt"),
    ({"prompt": "x", "prompt_ids": [1]}, "prompt and prompt_ids"),
    ({"prompt": "x", "topp": 1}, "unknown field 'topp'"),
    ({"prompt": "x", "detokenize": False}, "unknown field 'detokenize'"),
    ({"prompt": 3}, "must be a text"),
    ({"prompt_ids": [1, "a"]}, "list of token ids"),
    ({"prompt_ids": []}, "no tokens"),
    ({"prompt_ids": [320]}, "0 to 319"),
    ({"prompt_ids": [1] * 97}, "max_input_len is 96"),
    ({"prompt_ids": [1], "max_tokens": 128}, "max_seq_len 128"),
    ({"prompt": "x", "top_p": 2}, "top_p is 2"),
    ({"prompt": "x", "top_p": "1"}, "top_p is '1'"),
    ({"prompt": "x", "stop": 3}, "stop"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias"),
    ("[" * 99_999, "not JSON"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "\ud800"}, "half of a character"),
    ({"prompt": "x", "bad_words": ["\ud800"]}, "half of a character"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a character"),
    ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "temperature is 1000"),
    ({"prompt": "x", "logit_bias": {"²": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "x", "bad_words": [[999]]}, "bad_words has the token 999"),
    ({"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids has the token 320"),
    ({"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias has the token 320"),
    ({"messages": []}, "no messages"),
    ({"messages": "hi"}, "message"),
    ({"messages": [{"content": "x"}]}, "message 0"),
    ({"messages": 5}, "message"),
]


@pytest.mark.parametrize(("bad", "text"), BAD_LINES)
def test_a_bad_line_stops_everything_before_any_work(
    plansmith: Run, engine_dir: Path, tmp_path: Path, bad: Any, text: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, bad)
    target = tmp_path / "out.jsonl"
    result = plansmith("generate", engine_dir, "--input", source, "--output", target, *FLAGS)
    assert result.status == 1 and "line 2: " in result.err and text in result.err
    assert list(tmp_path.iterdir()) == [source], "nothing was written"


def test_keep_going_writes_the_error_in_its_place(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "x", "id": 1}, *(bad for bad, _ in BAD_LINES), {"prompt": "y"}]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    result = plansmith("generate", engine_dir, "--input", source, "--keep-going", *FLAGS)
    answers = read_lines(result.out)
    assert result.status == 1 and f"2 of {len(lines)} prompts answered" in result.err
    assert [entry["line"] for entry in answers] == list(range(1, len(lines) + 1))
    assert "text" in answers[0] and "text" in answers[-1]
    for entry, (_, text) in zip(answers[1:-1], BAD_LINES, strict=True):
        assert entry["error"]["kind"].endswith("Error") and text in entry["error"]["message"]


def test_other_bad_files(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "empty.jsonl")
    assert "has no lines" in plansmith("generate", engine_dir, "--input", empty).err
    assert "is not a file" in plansmith("generate", engine_dir, "--input", tmp_path / "none").err
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"})
    result = plansmith("generate", engine_dir, "--input", source, "--output", source)
    assert result.status == 1 and "is the --input file" in result.err
    assert read_lines(source.read_text()) == [{"prompt": "x"}]
    result = plansmith("generate", engine_dir, "--input", source, "--output", tmp_path)
    assert result.status == 1 and "is a directory; give a file's name" in result.err


def test_output_keeps_links_and_devices(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", {"prompt": "x", "id": "\ud800"}
    )  # half a character is JSON too
    link, real, pipe = tmp_path / "link", tmp_path / "real.jsonl", tmp_path / "pipe"
    link.symlink_to(real)
    assert plansmith("generate", engine_dir, "--input", source, "--output", link, *FLAGS).status == 0
    assert link.is_symlink()
    assert read_lines(real.read_text())[0]["id"] == "\ud800"
    os.mkfifo(pipe)
    unread = plansmith("generate", engine_dir, "--input", source, "--output", pipe, *FLAGS)
    assert (
        unread.status == 1 and f"{pipe} cannot be written: it is a pipe that no program reads" in unread.err
    )
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert plansmith("generate", engine_dir, "--input", source, "--output", pipe, *FLAGS).status == 0
    assert os.read(reader, 1 << 16).decode() == real.read_text() and pipe.is_fifo()
    os.close(reader)
    full = plansmith("generate", engine_dir, "--input", source, "--output", "/dev/full", *FLAGS)
    assert full.status == 1 and "plansmith: /dev/full: No space left" in full.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("hi", "--chat"), "PROMPT and --chat"),
        (("--chat", "--input", "x"), "--chat and --input"),
        (("hi", "--output", "x"), "--input"),
        (("--chat", "--json"), "--json"),
        (("hi", "--raw", "--system", "s"), "--raw"),
        (("hi", "--template-var", "x"), "NAME=JSON"),
        (("hi", "--template-var", "messages=1"), "NAME=JSON"),
        (("",), "the prompt is empty"),
        (("hi", "--top-p", "3"), "top_p is 3"),
        (("hi", "--temperature", "1e39"), "temperature is 1e+39"),
        (("hi", "--target", "sm89"), "no target 'sm89'"),
        (("hi", "--scheduler-policy", "fair"), "scheduler_policy"),
        (("hi", "--queue-order", "longest"), "queue_order is 'longest', it must be one of arrival, shortest"),
        (("hi", "--max-tokens", "500"), "max_seq_len"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    plansmith: Run, engine_dir: Path, arguments: tuple[str, ...], text: str
) -> None:
    result = plansmith("generate", engine_dir, *arguments)
    assert result.status == 1
    assert result.out == "" or json.loads(result.out)["error"]["kind"] == "InvalidArgumentError"
    assert text in result.err and "Traceback" not in result.err


def chat(plansmith: Run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch, typed: str, *flags: Any) -> Any:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return plansmith("generate", engine_dir, "--chat", "--threads", 1, *flags)


def test_a_conversation_remembers_its_turns(
    plansmith: Run, engine: Engine, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plain text alone: bytes that are no character come back from the answer as another text.
    printable = {"logit_bias": {i: -100.0 for i in range(3, 320) if not _is_word(engine, i)}}
    monkeypatch.setattr(_options, "open_engine", _biased(printable))
    params = SamplingParams(max_tokens=5, temperature=0.0, **printable)
    result = chat(plansmith, engine_dir, monkeypatch, "hi\n\nyou\n/reset\nhi\n", "--max-tokens", 5)
    turns: list[dict[str, str]] = []
    expected = []
    for text in ("hi", "you"):
        turns.append({"role": "user", "content": text})
        expected.append(answer(engine, engine.chat_ids(turns), params))
        turns.append({"role": "assistant", "content": expected[-1]})
    assert result.out == "".join(text + "\n" for text in (*expected, expected[0]))
    assert result.status == 0


def test_a_terminal_is_told_how_to_end(
    plansmith: Run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = io.StringIO("")
    assert "Ctrl-D" not in chat(plansmith, engine_dir, monkeypatch, "").err
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    result = plansmith("generate", engine_dir, "--chat", "--threads", 1)
    assert result.status == 0 and "Ctrl-C stops an answer, Ctrl-D ends" in result.err


def _is_word(engine: Engine, token: int) -> bool:
    assert engine.tokenizer is not None
    return engine.tokenizer.decode([token]).isalpha()


def _biased(fields: dict[str, Any]) -> Callable[..., Engine]:
    """Return open_engine whose engine adds `fields` to every request."""
    real = _options.open_engine

    def opened(*args: Any, **kwargs: Any) -> Engine:
        import dataclasses

        engine = real(*args, **kwargs)
        submit = engine.submit
        engine.submit = lambda ids, params, **kw: submit(ids, dataclasses.replace(params, **fields), **kw)  # type: ignore[method-assign,assignment]
        return engine

    return opened


def test_a_conversation_that_grows_too_long_says_so_and_goes_on(
    plansmith: Run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = chat(plansmith, engine_dir, monkeypatch, "x" * 90 + "\nhi\n", "--max-tokens", 4)
    assert result.status == 0
    assert "max_input_len is 96" in result.err and "/reset" in result.err
    assert result.out.count("\n") >= 1, "the second question was answered"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(engine_dir: Path) -> None:
    """In a process of its own: a slow engine, a signal in the middle of an answer, and a second question."""
    program = (
        "import sys, time\n"
        "from plansmith.runtime.engine import Engine\n"
        "submit = Engine.submit\n"
        "class Slow:\n"
        "    def __init__(self, handle): self.handle = handle\n"
        "    def __iter__(self): return self\n"
        "    def __next__(self):\n"
        "        delta = next(self.handle)\n"
        "        time.sleep(0.05)\n"
        "        return delta\n"
        "    def cancel(self): self.handle.cancel(); print('<cancelled>', flush=True)\n"
        "Engine.submit = lambda *a, **k: Slow(submit(*a, **k))\n"
        "from plansmith.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", program, "generate", str(engine_dir), "--chat", "--threads", "1"]
    child = subprocess.Popen(
        [*command, "--ignore-eos", "--max-tokens", "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b"hi\n")
        child.stdin.flush()
        assert child.stdout.read(1), "the answer has begun"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(b"hi\n", timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, err.decode()
    assert out.count(b"<cancelled>") == 1
    assert out.split(b"<cancelled>")[1].count(b"\n") >= 2, "the second answer ends with a line of its own"
