"""ensemble and tensorrt_llm_bls in a real tritonserver: text in, text out, as clients of the older stack ask for it."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.write import write_repository
from tiny_engines import LIMITS
from triton_servers import RunningTriton, TritonServers

grpcclient = pytest.importorskip("tritonclient.grpc")

MODELS = ["ensemble", "tensorrt_llm_bls"]
BLS = "tensorrt_llm_bls"
PROMPTS = ["the quick brown fox", "Zwölf Boxkämpfer", "今日は", "a"]
LONG = 6000  # tokens: seconds of this engine, so that a stop comes in the middle
Row = dict[str, Any]


@pytest.fixture(scope="module")
def server(
    triton_server: TritonServers, engine_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunningTriton:
    """Return a server of the five models, and of the engine once more under the name of a draft model."""
    folder = tmp_path_factory.mktemp("text_repository") / "models"
    parameters = {
        ("tensorrt_llm", "num_threads"): "1",
        ("tensorrt_llm", "stream_interval_ms"): "0",  # an answer has few tokens, so that texts are cut
        ("tensorrt_llm", "max_beam_width"): "2",
        ("tensorrt_llm", "cancellation_check_period_ms"): "20",
        (BLS, "tensorrt_llm_draft_model_name"): "tensorrt_llm_draft",
    }
    write_repository(make_plan(engine_dir, folder, Overrides({}, parameters)), folder)
    config = (folder / "tensorrt_llm" / "config.pbtxt").read_text()
    (folder / "tensorrt_llm_draft" / "1").mkdir(parents=True)
    (folder / "tensorrt_llm_draft" / "config.pbtxt").write_text(
        config.replace('name: "tensorrt_llm"', 'name: "tensorrt_llm_draft"')
    )
    model = (folder / "tensorrt_llm" / "1" / "model.py").read_text()
    (folder / "tensorrt_llm_draft" / "1" / "model.py").write_text(model)
    return triton_server(folder)


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Callable[..., list[list[int]]]:
    """Return what gives the engine's own tokens of a prompt, a list an output."""

    def tokens(prompt: str, max_tokens: int, **params: Any) -> list[list[int]]:
        chosen = {"temperature": 0.0, "detokenize": False, "min_tokens": 1, **params}
        (one,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens, **chosen))
        return [list(output.token_ids) for output in one.outputs]

    return tokens


def inputs(texts: Sequence[str], max_tokens: int, **others: Any) -> dict[str, NDArray[Any]]:
    """Return a request's tensors; of the others a list is a row's, the same for all rows."""
    rows = len(texts)
    made = {
        "text_input": np.array([[text.encode()] for text in texts], object),
        "max_tokens": np.full((rows, 1), max_tokens, np.int32),
    }
    for name, value in others.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], str):
            array: NDArray[Any] = np.array([[one.encode() for one in values]] * rows, object)
        else:
            kind = {bool: np.bool_, int: np.int32, float: np.float32}[type(values[0])]
            array = np.array([values] * rows, kind)
        made[name] = array
    return made


_TYPES = {"i": "INT32", "b": "BOOL", "f": "FP32", "O": "BYTES"}


class Client:
    """One gRPC stream for one request."""

    def __init__(
        self, server: RunningTriton, model: str, tensors: Mapping[str, NDArray[Any]], request_id: str = ""
    ):
        self._client = grpcclient.InferenceServerClient(server.grpc)
        self._answers: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)))
        sent = []
        for name, array in tensors.items():
            one = grpcclient.InferInput(name, array.shape, _TYPES[array.dtype.kind])
            one.set_data_from_numpy(array)
            sent.append(one)
        self._client.async_stream_infer(model, sent, request_id=request_id, enable_empty_final_response=True)

    def next(self) -> dict[str, NDArray[Any]] | None:
        """Return an answer's outputs, None for the end; raises what it failed with."""
        result, error = self._answers.get(timeout=30)
        if error is not None:
            raise error
        response = result.get_response()
        self.is_final = response.parameters["triton_final_response"].bool_param
        if self.is_final and not response.outputs:
            return None
        return {one.name: result.as_numpy(one.name) for one in response.outputs}

    def all(self) -> list[dict[str, NDArray[Any]]]:
        answers = []
        while (answer := self.next()) is not None:
            answers.append(answer)
            if self.is_final:
                break
        self.close()
        return answers

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def ask(
    server: RunningTriton, model: str, *args: Any, request_id: str = "", **others: Any
) -> list[dict[str, Any]]:
    return Client(server, model, inputs(*args, **others), request_id).all()


def texts_of(answers: list[dict[str, Any]]) -> dict[tuple[int, int, int], str]:
    """Return the texts put together, by batch index, sequence index and beam."""
    texts: dict[tuple[int, int, int], str] = {}
    for answer in answers:
        row, index = (
            int(answer[name].ravel()[0]) if name in answer else 0
            for name in ("batch_index", "sequence_index")
        )
        for i, text in enumerate(answer["text_output"]):
            texts[row, index, i] = texts.get((row, index, i), "") + text.decode()
    return texts


def wait_until_idle(server: RunningTriton) -> None:
    deadline = time.monotonic() + 20
    while True:
        active = [
            line
            for line in server.api.metrics(5).splitlines()
            if line.startswith("nv_trt_llm_request_metrics") and 'request_type="active"' in line
        ]
        if active and all(float(line.split()[-1]) == 0 for line in active):
            return
        assert time.monotonic() < deadline, active
        time.sleep(0.05)


@pytest.mark.parametrize("model", MODELS)
def test_the_text_is_that_of_the_engines_tokens(
    server: RunningTriton, engine: Engine, expected: Callable[..., list[list[int]]], model: str
) -> None:
    """Whole with the prompt, whole without it, and in pieces."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    num_answers = 0
    for prompt in PROMPTS:
        (ids,) = expected(prompt, 1000)
        alone = tokenizer.decode(ids)
        (whole,) = ask(server, model, [prompt], 1000)
        assert texts_of([whole])[0, 0, 0] == tokenizer.decode([*tokenizer.encode(prompt), *ids])
        assert whole["text_output"].shape == (1,)
        (output,) = ask(server, model, [prompt], 1000, exclude_input_in_output=True)
        assert texts_of([output])[0, 0, 0] == alone
        stream = ask(server, model, [prompt], 1000, stream=True)
        num_answers += len(stream)
        assert texts_of(stream)[0, 0, 0] == alone
    assert num_answers > len(PROMPTS)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_rows_and_sequences_have_their_places(
    server: RunningTriton, engine: Engine, expected: Callable[..., list[list[int]]], model: str, stream: bool
) -> None:
    """A batch of prompts of different lengths, and two outputs of each."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    answers = ask(
        server,
        model,
        PROMPTS,
        12,
        stream=stream,
        exclude_input_in_output=True,
        num_return_sequences=2,
        top_k=5,
    )
    texts = texts_of(answers)
    assert sorted(texts) == [(row, index, 0) for row in range(len(PROMPTS)) for index in (0, 1)]
    for row, prompt in enumerate(PROMPTS):
        wanted = expected(prompt, 12, n=2, top_k=5, temperature=1.0, seed=0)
        assert [texts[row, index, 0] for index in (0, 1)] == [tokenizer.decode(ids) for ids in wanted]


@pytest.mark.parametrize("model", MODELS)
def test_beams(
    server: RunningTriton, engine: Engine, expected: Callable[..., list[list[int]]], model: str
) -> None:
    """One answer with a text a beam, the best first."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    (answer,) = ask(
        server, model, [PROMPTS[0]], 10, beam_width=2, exclude_input_in_output=True, return_log_probs=True
    )
    wanted = expected(PROMPTS[0], 10, beam_width=2, length_penalty=0.0, early_stopping=True)
    assert [text.decode() for text in answer["text_output"]] == [tokenizer.decode(ids) for ids in wanted]
    assert answer["cum_log_probs"].shape == (1, 2)


@pytest.mark.parametrize(("stream", "has_prompt"), [(False, False), (False, True), (True, False)])
def test_a_stop_word_is_found_in_the_text(
    server: RunningTriton,
    engine: Engine,
    expected: Callable[..., list[list[int]]],
    stream: bool,
    has_prompt: bool,
) -> None:
    """A word that begins inside a token and ends inside another, with all that it cuts; the engine stops there too."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = PROMPTS[0]
    (ids,) = expected(prompt, 60)
    text = tokenizer.decode(ids)
    word = text[11:14]
    wanted = text[: text.index(word) + len(word)]
    started = time.monotonic()
    more = {} if stream else {"exclude_input_in_output": not has_prompt, "return_num_output_tokens": True}
    answers = ask(
        server,
        BLS,
        [prompt],
        LONG,
        stream=stream,
        return_log_probs=True,
        stop_words=["not in it", word],
        **more,
    )
    assert texts_of(answers)[0, 0, 0] == (prompt if has_prompt else "") + wanted
    assert answers[-1]["finish_reasons"].ravel().tolist() == [2]
    num_tokens = next(n for n in range(1, 61) if tokenizer.decode(ids[:n]).startswith(wanted))
    assert sum(one["output_log_probs"].shape[-1] for one in answers) == num_tokens
    if not stream:
        (answer,) = answers
        assert answer["num_output_tokens"].item() == num_tokens
        np.testing.assert_allclose(
            answer["cum_log_probs"].item(), answer["output_log_probs"].sum(), rtol=1e-4
        )
    wait_until_idle(server)
    assert time.monotonic() - started < 5


def test_stop_words_of_a_batch_end_each_row_by_itself(
    server: RunningTriton, engine: Engine, expected: Callable[..., list[list[int]]]
) -> None:
    """One row's word ends that row; the others go on to their full length."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.decode(expected(prompt, 60)[0]) for prompt in PROMPTS]
    word = next(
        texts[1][i : i + 4] for i in range(9, 50) if all(texts[1][i : i + 4] not in t for t in texts[2:])
    )
    for stream in (False, True):
        answers = ask(
            server, BLS, PROMPTS, 60, stream=stream, exclude_input_in_output=True, stop_words=[word]
        )
        wanted = [text[: text.index(word) + 4] if word in text else text for text in texts]
        assert texts_of(answers) == {(row, 0, 0): text for row, text in enumerate(wanted)}


def test_a_stop_ends_a_request_by_its_clients_id(server: RunningTriton) -> None:
    """Sent to either model; the request answers with what it has."""
    for model, stop in ((BLS, inputs(["x"], 1, stop=True)), ("tensorrt_llm", None)):
        client = Client(server, BLS, inputs([PROMPTS[0]], LONG, stream=True), "mine")
        assert client.next() is not None
        ids = np.ones((1, 1), np.int32)
        tokens = {
            "input_ids": ids,
            "input_lengths": ids,
            "request_output_len": ids,
            "stop": ids.astype(np.bool_),
        }
        assert Client(server, model, stop or tokens, "mine").all() == []
        rest = client.all()
        assert rest[-1]["finish_reasons"].ravel().tolist() == [5]
        wait_until_idle(server)


def test_two_requests_of_one_id_are_both_answered(server: RunningTriton) -> None:
    """Older clients of this model could have the same id all the time."""
    clients = [Client(server, BLS, inputs([PROMPTS[i]], 30, stream=True), "1") for i in range(3)]
    alone = [texts_of(ask(server, BLS, [PROMPTS[i]], 30, stream=True)) for i in range(3)]
    assert [texts_of(client.all()) for client in clients] == alone


def test_a_client_that_goes_away_frees_the_engine(server: RunningTriton) -> None:
    for _ in range(3):
        connection = http.client.HTTPConnection(server.http, timeout=30)
        body = {"text_input": PROMPTS[0], "max_tokens": LONG, "stream": True}
        connection.request("POST", f"/v2/models/{BLS}/generate_stream", json.dumps(body))
        response = connection.getresponse()
        assert response.readline().startswith(b"data:")
        connection.sock.close() if connection.sock else None
        response.close()
        connection.close()
    wait_until_idle(server)


@pytest.mark.parametrize("model", MODELS)
def test_an_error_is_that_of_its_request_alone(server: RunningTriton, model: str) -> None:
    """Bytes that are no text, among good requests at the same time."""
    bad = {**inputs(["x"], 5), "text_input": np.array([[b"\xff\x00"]], object)}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        good = [pool.submit(ask, server, model, [PROMPTS[0]], 10) for _ in range(4)]
        with pytest.raises(Exception, match="UTF-8"):
            Client(server, model, bad).all()
        texts = {texts_of(one.result())[0, 0, 0] for one in good}
    assert len(texts) == 1


@pytest.mark.parametrize("model", MODELS)
def test_a_decoders_prompt_is_refused(server: RunningTriton, model: str) -> None:
    """Not dropped in silence: this engine runs decoders alone, whose prompt is text_input."""
    with pytest.raises(Exception, match="decoder_input_ids"):
        ask(server, model, ["x"], 5, decoder_text_input=["some words"])


def test_images_and_wrong_words_are_named(server: RunningTriton) -> None:
    image = {**inputs(["x"], 5), "image_bytes_input": np.zeros((1, 1, 2, 2, 3), np.uint8)}
    _TYPES["u"] = "UINT8"
    with pytest.raises(Exception, match="image_bytes_input"):
        Client(server, BLS, image).all()
    with pytest.raises(Exception, match="embedding_bias_weights"):
        ask(server, BLS, ["x"], 5, embedding_bias_words=["dog"])


def test_many_at_once(server: RunningTriton) -> None:
    """More requests than the server has threads for: each is answered, and waits for none but the engine."""
    with concurrent.futures.ThreadPoolExecutor(80) as pool:
        jobs = [pool.submit(ask, server, BLS, [PROMPTS[i % 4]], 20, stream=True) for i in range(80)]
        texts = [texts_of(job.result())[0, 0, 0] for job in jobs]
    assert [len(set(texts[i::4])) for i in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("use_draft_logits", [False, True])
def test_drafts_of_a_model_in_the_server_change_no_token(
    server: RunningTriton,
    engine: Engine,
    expected: Callable[..., list[list[int]]],
    stream: bool,
    use_draft_logits: bool,
) -> None:
    """Rounds of draft and check, of one prompt and of a batch, with the metrics of all rounds."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    wanted = [tokenizer.decode(expected(prompt, 21)[0]) for prompt in PROMPTS]
    more = {"num_draft_tokens": 4, "use_draft_logits": use_draft_logits, "exclude_input_in_output": True}
    answers = ask(
        server, BLS, PROMPTS[:1], 21, stream=stream, return_perf_metrics=True, return_log_probs=True, **more
    )
    assert texts_of(answers) == {(0, 0, 0): wanted[0]}
    assert sum(one["output_log_probs"].shape[-1] for one in answers) == len(expected(PROMPTS[0], 21)[0])
    assert answers[-1]["total_accepted_draft_tokens"].item() > 0
    plain = ask(server, BLS, PROMPTS[:1], 21, return_log_probs=True, exclude_input_in_output=True)
    np.testing.assert_allclose(answers[-1]["cum_log_probs"], plain[0]["cum_log_probs"], rtol=1e-4)
    batch = texts_of(ask(server, BLS, PROMPTS, 21, stream=stream, **more))
    assert batch == {(row, 0, 0): text for row, text in enumerate(wanted)}


def test_drafts_go_on_behind_the_longest_prompt(
    server: RunningTriton, engine: Engine, expected: Callable[..., list[list[int]]]
) -> None:
    """A round's prompt, which has the output so far, may be longer than the engine takes: the rest is made at once."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = "ab" * 40
    assert len(tokenizer.encode(prompt)) + 40 > LIMITS["max_input_len"]
    wanted = tokenizer.decode(expected(prompt, 40)[0])
    for stream in (False, True):
        answers = ask(
            server, BLS, [prompt], 40, stream=stream, num_draft_tokens=4, exclude_input_in_output=True
        )
        assert texts_of(answers)[0, 0, 0] == wanted


def test_models_of_one_answer_a_request(
    triton_server: TritonServers,
    engine: Engine,
    engine_dir: Path,
    expected: Callable[..., list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Not decoupled, so by plain inference too; and the engine's own drafts, as many as num_draft_tokens says."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    folder = tmp_path_factory.mktemp("one_answer") / "models"
    parameters = {("tensorrt_llm", "num_threads"): "1", ("tensorrt_llm", "draft_engine_dir"): str(engine_dir)}
    write_repository(
        make_plan(engine_dir, folder, Overrides({"decoupled_mode": "false"}, parameters)), folder
    )
    server = triton_server(folder, ["tensorrt_llm", BLS], fresh=True)

    def post(body: Mapping[str, Any]) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(server.http, timeout=30)
        connection.request("POST", f"/v2/models/{BLS}/generate", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    prompt = "a b a b a b a b"
    (ids,) = expected(prompt, 60)
    text = tokenizer.decode(ids)
    body = {"text_input": prompt, "max_tokens": 60, "exclude_input_in_output": True}
    status, answer = post({**body, "num_draft_tokens": 3, "return_perf_metrics": True})
    assert (status, answer["text_output"]) == (200, text)
    assert answer["total_draft_tokens"] > 0
    status, answer = post({**body, "num_draft_tokens": 0, "return_perf_metrics": True})
    assert (status, answer["text_output"], answer["total_draft_tokens"]) == (200, text, 0)
    status, answer = post({**body, "stop_words": [text[20:24]]})
    assert answer["text_output"] == text[: text.index(text[20:24]) + 4]
    for wrong in ({"stream": True}, {"decoder_text_input": "some words"}, {"num_draft_tokens": -1}):
        status, answer = post({**body, **wrong})
        assert status == 400 and (
            "streaming" in str(answer) or "decoder" in str(answer) or "num_draft" in str(answer)
        )
    assert triton_server.stop(server) == 0


def test_a_model_of_text_that_cannot_be_opened_says_why(
    triton_server: TritonServers, engine_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    write_repository(make_plan(engine_dir, folder, Overrides()), folder)
    config = folder / "preprocessing" / "config.pbtxt"
    tokenizer_dir = str(engine_dir / "tokenizer")
    assert tokenizer_dir in config.read_text()
    config.write_text(config.read_text().replace(tokenizer_dir, str(tmp_path)))
    with pytest.raises(Exception, match="preprocessing: tokenizer_dir is "):
        triton_server(folder, ["preprocessing"], fresh=True)
