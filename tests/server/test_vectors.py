"""Tests of embeddings, scores and reranking over HTTP, with an engine in this process."""

import asyncio
import base64
import math
from typing import Any

import numpy as np
import pytest
from asgi_clients import openai_client, run
from fake_engine import FakeClient, ask, refused
from vector_client import VectorClient

from slotzero import LLM, PoolingParams, SamplingParams
from slotzero.text.score_template import QWEN3_RERANKER, ScoreTemplate
from slotzero.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
TEXTS = ["first", "a second text", "ünïcode \N{SNOWMAN}"]


@pytest.fixture(scope="module")
def client() -> VectorClient:
    return VectorClient(pooling="mean")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny:llama", backend="eager", show_progress=False, pooling="mean")


@pytest.fixture(scope="module")
def judge() -> VectorClient:
    return VectorClient(score_tokens="n,y")


@pytest.fixture(scope="module")
def judging_llm() -> LLM:
    return LLM("tiny:llama", backend="eager", show_progress=False, score_tokens="n,y")


def post(client: FakeClient, path: str, **body: Any) -> Any:
    response = ask(client, path, body)
    assert response.status_code == 200, response.text
    return response.json()


def offline(llm: LLM, prompts: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, False)]


def test_the_official_client_gets_embeddings(client: VectorClient, llm: LLM) -> None:
    wanted = offline(llm, TEXTS)

    async def work() -> None:
        openai = openai_client(client)
        for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = await openai.embeddings.create(model="tiny", input=TEXTS, **more)
            shown = [item.embedding for item in found.data]
            if more.get("encoding_format") == "base64":
                shown = [np.frombuffer(base64.b64decode(str(e)), "<f4").tolist() for e in shown]
            assert shown == wanted
            assert [item.index for item in found.data] == [0, 1, 2]
            num_tokens = sum(len(text.encode()) + 1 for text in TEXTS)
            assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens,) * 2
            assert (found.object, found.model) == ("list", "tiny")

    run(work)
    assert all(math.isclose(np.linalg.norm(vector), 1, abs_tol=1e-6) for vector in wanted)


def test_an_input_is_text_or_tokens_alone_or_in_a_list(client: VectorClient) -> None:
    tokens = [256, *b"first"]
    (expected,) = vectors(post(client, EMBEDDINGS, input="first"))
    for one in (tokens, [tokens], ["first"]):
        assert vectors(post(client, EMBEDDINGS, input=one)) == [expected]
    assert vectors(post(client, EMBEDDINGS, input=[tokens, tokens])) == [expected] * 2
    (plain,) = vectors(post(client, EMBEDDINGS, input="first", add_special_tokens=False))
    assert vectors(post(client, EMBEDDINGS, input=tokens[1:])) == [plain] != [expected]


def vectors(reply: Any) -> list[list[float]]:
    return [item["embedding"] for item in reply["data"]]


def test_an_embedding_need_not_be_normalised(client: VectorClient, llm: LLM) -> None:
    (raw,) = vectors(post(client, EMBEDDINGS, input="x", use_activation=False))
    (output,) = llm.embed("x", False, pooling_params=PoolingParams(normalize=False))
    assert raw == output.outputs.embedding
    assert not math.isclose(np.linalg.norm(raw), 1, abs_tol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_input_is_cut_on_request(client: VectorClient, side: str) -> None:
    body = {"truncate_prompt_tokens": 4, "truncation_side": side}
    cut = post(client, EMBEDDINGS, input="abcdefgh", **body)
    assert cut["usage"]["prompt_tokens"] == 4
    kept = b"abc" if side == "right" else b"fgh"
    assert vectors(cut) == vectors(post(client, EMBEDDINGS, input=[256, *kept]))
    long = post(client, EMBEDDINGS, input="x" * 2000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == client.engine.limits.max_model_len
    of_tokens = post(client, EMBEDDINGS, input=[*range(9)], **body)
    wanted = [0, 1, 2, 3] if side == "right" else [5, 6, 7, 8]
    assert vectors(of_tokens) == vectors(post(client, EMBEDDINGS, input=wanted))


def test_more_inputs_than_are_open_at_once_keep_their_order(client: VectorClient) -> None:
    inputs = [[i % 250, i // 250] for i in range(300)]
    found = vectors(post(client, EMBEDDINGS, input=inputs))
    assert len(found) == 300
    for i in (0, 127, 128, 299):
        assert found[i] == vectors(post(client, EMBEDDINGS, input=inputs[i]))[0]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": [[]]}, "input[0]", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [1] * 513}, "input", "513 tokens do not fit into the context of 512"),
        ({"input": ["ok", "x" * 600]}, "input[1]", "601 tokens do not fit"),
        ({"input": "x" * 100_000}, "input", "characters do not fit"),
        ({"input": [300]}, "input", "token id 300 is not in the vocabulary"),
        ({"input": "a", "dimensions": 16}, "dimensions", "Matryoshka"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "only with"),
        ({"input": "a", "colour": 1}, "colour", "unknown field"),
        ({}, "input", "missing"),
    ],
)
def test_a_bad_embedding_request(
    client: VectorClient, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(EMBEDDINGS, body, client)
    assert error["param"] == param
    assert words in error["message"]


def test_matryoshka_dimensions(client: VectorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    pooling = {**client.info["pooling"], "is_matryoshka": True}
    monkeypatch.setattr(client, "info", {**client.info, "pooling": pooling})
    (raw,) = vectors(post(client, EMBEDDINGS, input="ab", use_activation=False))
    for num in (1, 7, 64):
        (cut,) = vectors(post(client, EMBEDDINGS, input="ab", dimensions=num))
        start = np.array(raw[:num])
        assert cut == pytest.approx(start / np.linalg.norm(start), abs=1e-6)
    error = refused(EMBEDDINGS, {"input": "ab", "dimensions": 65}, client)
    assert "between 1 and 64" in error["message"] and error["param"] == "dimensions"
    pooling["matryoshka_dimensions"] = (8, 32)
    assert len(vectors(post(client, EMBEDDINGS, input="ab", dimensions=32))[0]) == 32
    assert (
        "not one of 8, 32"
        in refused(EMBEDDINGS, {"input": "a", "dimensions": 9}, client)["message"]
    )


def test_scores_are_similarities_of_embeddings(client: VectorClient, llm: LLM) -> None:
    query, *documents = TEXTS
    one, *others = offline(llm, TEXTS)
    wanted = [float(np.dot(one, other)) for other in others]
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        reply = post(client, SCORE, **dict(zip(names, (query, documents), strict=True)))
        assert [item["score"] for item in reply["data"]] == pytest.approx(wanted, abs=1e-6)
    assert [item["index"] for item in reply["data"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == sum(len(text.encode()) + 1 for text in TEXTS)
    pairs = post(client, "/score", queries=TEXTS, documents=TEXTS[::-1])
    assert pairs["data"][1]["score"] == pytest.approx(1)
    same = llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)
    found = [item["score"] for item in pairs["data"]]
    assert [output.outputs.score for output in same] == pytest.approx(found, abs=1e-6)


def test_documents_are_reranked(client: VectorClient) -> None:
    scores = post(client, SCORE, queries="a", documents=TEXTS)["data"]
    by_index = [item["score"] for item in scores]
    order = sorted(range(3), key=lambda i: -by_index[i])
    for path in (RERANK, "/rerank", "/v2/rerank"):
        reply = post(client, path, query="a", documents=TEXTS)
        assert [result["index"] for result in reply["results"]] == order
    assert [result["document"] for result in reply["results"]] == [
        {"text": TEXTS[i]} for i in order
    ]
    (best,) = post(client, RERANK, query="a", documents=TEXTS, top_n=1, return_documents=False)[
        "results"
    ]
    assert best == {"index": order[0], "relevance_score": pytest.approx(by_index[order[0]])}


def test_a_reranker_answers_in_words(judge: VectorClient, judging_llm: LLM) -> None:
    """The score is the softmax over the logits of both answers after the rendered prompt."""
    asked = {"query": "q", "documents": ["one", "two"], "instruction": "Find"}
    reply = post(judge, RERANK, **asked)
    found = {result["index"]: result["relevance_score"] for result in reply["results"]}
    template, tokenizer = ScoreTemplate(), Tokenizer.bytes_tokenizer()
    for i, document in enumerate(["one", "two"]):
        text = template.render("q", document, {"instruction": "Find"})
        prompt = tokenizer.encode(text, add_special_tokens=False)
        judge.engine.add("one", prompt, SamplingParams(temperature=0, max_tokens=1))
        while judge.engine.has_work:
            judge.engine.step()
        logits = judge.engine.worker.registry["logits"][0].double()
        expected = logits[[ord("n"), ord("y")]].softmax(-1)[1].item()
        assert found[i] == pytest.approx(expected, abs=1e-6)
        assert judge.submitted[-2 + i][1] == prompt
    same = judging_llm.score("q", ["one", "two"], use_tqdm=False, instruction="Find")
    assert [output.outputs.score for output in same] == pytest.approx([found[0], found[1]])
    assert reply["usage"]["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in same)


def test_the_template_of_qwen3_reranker() -> None:
    text = ScoreTemplate().render("Q", "D", {})
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets")
    assert "<Instruct>: Given a web search query, retrieve relevant passages" in text
    assert text.endswith(
        "\n<Query>: Q\n<Document>: D<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert "<Instruct>: I\n" in ScoreTemplate().render("Q", "D", {"instruction": "I"})
    of_vllm = (
        "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    )
    assert ScoreTemplate(of_vllm).render("Q", "D", {}) == "D"
    assert QWEN3_RERANKER.count("{{") == 3


def test_texts_are_clipped(client: VectorClient) -> None:
    whole = post(client, SCORE, queries="abcd", documents=["xyzw", "xy"], max_tokens_per_doc=2)
    assert whole["data"][0]["score"] == whole["data"][1]["score"]
    cut = post(client, SCORE, queries="abcd", documents="abzz", max_tokens_per_query=2,
               max_tokens_per_doc=2)  # fmt: skip
    assert cut["data"][0]["score"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (SCORE, {"queries": "a"}, "queries", "queries and documents"),
        (SCORE, {"queries": "a", "text_2": "b"}, "queries", "queries and documents"),
        (SCORE, {"queries": ["a", "b"], "documents": ["a"] * 3}, "documents", "2 texts"),
        (SCORE, {"queries": [], "documents": ["a"]}, "queries", "empty"),
        (SCORE, {"queries": "a", "documents": ["a", ""]}, "documents[1]", "empty"),
        (SCORE, {"queries": "a", "documents": "b", "instruction": "c"}, "instruction", "only with"),
        (RERANK, {"query": "", "documents": ["a"]}, "query", "empty"),
        (RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents", "at most 2048"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal"),
        (RERANK, {"query": "a", "documents": ["x" * 600]}, "documents", "do not fit"),
    ],
)
def test_a_bad_score_request(
    client: VectorClient, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(path, body, client)
    assert error["param"] == param
    assert words in error["message"]


def test_what_an_engine_cannot_is_refused_by_name(judge: VectorClient) -> None:
    assert "--score-tokens" in refused(EMBEDDINGS, {"input": "a"}, judge)["message"]
    body = {"query": "a", "documents": ["b"], "chat_template_kwargs": {"messages": []}}
    assert "'messages' is set by the engine" in refused(RERANK, body, judge)["message"]
    loading = FakeClient(state="loading")
    loading.info = {}
    error = refused(EMBEDDINGS, {"input": "a"}, loading, status=503)
    assert error["code"] == "engine_unavailable" and "loading" in error["message"]


def test_a_client_that_leaves_cancels_its_requests() -> None:
    waiting = FakeClient(hangs_at=0)

    async def leave() -> None:
        openai = openai_client(waiting)
        task = asyncio.create_task(openai.embeddings.create(model="tiny", input=TEXTS))
        while len(waiting.submitted) < len(TEXTS):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while len(waiting.closed) < len(TEXTS):
            await asyncio.sleep(0)

    run(leave)
    assert sorted(waiting.closed) == sorted(request_id for request_id, _, _ in waiting.submitted)
