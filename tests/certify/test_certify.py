"""Tests of the command `slotzero certify`: its output, files and exit codes."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slotzero.certify import session, synthetic_requests
from slotzero.certify.certify import all_sizes, few_checks, few_sizes, left_out
from slotzero.certify.mutants import Mutant
from slotzero.certify.page import html
from slotzero.certify.report import CHECKS, RULES, Cell, Certificate, Violation
from slotzero.certify.scenario import Trial
from slotzero.certify.scenarios import scenario_for
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.cli import main as cli
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.executor.rank_group import RankGroup
from slotzero.graph import Pieces, Runner
from slotzero.graph.transfer import UploadRing
from slotzero.kernels import torch_speculation
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.types import Rows, Tokens
from slotzero.models.families.family import families
from slotzero.runners.passes import DrafterInputs
from slotzero.speculative import eagle
from slotzero.speculative.eagle import EagleDrafter

pytestmark = pytest.mark.slow


def small(model: str = "llama", seqs: int = 4, tokens: int = 64) -> list[str]:
    return [f"tiny:{model}", "--max-num-seqs", str(seqs), "--max-num-batched-tokens", str(tokens)]


EAGER = ["--backend", "eager"]
TINY = [*small(), *EAGER]
EAGLE3 = ["--speculative", "eagle3", "--no-speculative-adaptive"]
NGRAM = ["--speculative", "ngram"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls the command and returns exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(["certify", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Return a list of all engines that the command creates."""
    made: list[Engine] = []
    init = Engine.__init__

    def noted(self: Engine, config: EngineConfig, rank_group: RankGroup) -> None:
        init(self, config, rank_group)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", noted)
    return made


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inject the fault that certification is about: a published tensor keeps its old tail."""

    def upload(self: UploadRing, values: Sequence[int], pad: int) -> None:
        self._target[: len(values)] = torch.tensor(list(values), dtype=self._target.dtype)

    monkeypatch.setattr(UploadRing, "upload", upload)


def runner_of(name: str, max_num_seqs: int = 8) -> Runner:
    config = EngineConfig(
        model="tiny:llama", backend="eager", max_num_seqs=max_num_seqs, lazy_recording=True,
        skip_tokenizer_init=True, show_progress=False, kv_cache_memory=1 << 20,
    )  # fmt: skip
    return next(r for r in Engine(config).worker.runners if r.spec.name == name)


def test_a_sound_engine_passes(run: Run) -> None:
    code, out, err = run(*TINY)
    assert (code, err) == (0, "")
    assert "tiny:llama on eager" in out
    for check in CHECKS:
        assert check in out
    rows = [line for line in out.splitlines() if line.startswith("│ decode[")]
    assert [row.split()[1] for row in rows] == ["decode[1]", "decode[2]", "decode[4]"]
    assert all(row.count(" ok ") == len(CHECKS) for row in rows)
    assert "FAIL" not in out
    assert "3 of 12 sizes checked: this runner is not recorded" in out
    assert out.splitlines()[-1].startswith("passed: 12 of 39 sizes in ")


def test_only_json_is_printed(run: Run) -> None:
    code, out, err = run(*TINY, "--json", "-")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["passed"] is True
    assert report["runners"] == ["decode", "prefill", "pooled prefill", "scored prefill"]
    assert "decode[4]" in report["sizes"]
    assert len(report["sizes"]) == 12
    assert report["failures"] == []
    assert "mutants" not in report


def test_files_are_written(run: Run, tmp_path: Path) -> None:
    files = tmp_path / "a.json", tmp_path / "ä <b>.html"
    files[0].write_text("what was there before, and is longer than nothing\n" * 1000)
    code, out, _ = run(*TINY, "--quick", "--json", str(files[0]), "--html", str(files[1]))
    assert code == 0
    assert "passed: 5 of 39 sizes" in out
    assert json.loads(files[0].read_text())["passed"] is True
    assert "decode[4] S1: passed" in files[1].read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_refused_first(
    run: Run, tmp_path: Path, flag: str
) -> None:
    for file in (tmp_path / "no" / "such" / "folder", tmp_path):
        code, out, err = run("no-such-model", flag, str(file))
        assert (code, out) == (2, "")
        assert err.startswith(f"slotzero: error: {flag} {file}: ")
        assert err.count("\n") == 1
    assert run("no-such-model", flag, str(tmp_path / "fine"))[0] == 3
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_one_line(run: Run) -> None:
    code, out, err = run(*TINY, "--quick", "--html", "/dev/full")
    assert code == 2
    assert "passed: 5 of 39 sizes" in out
    assert err.startswith("slotzero: error: --html /dev/full: cannot be written")


def test_a_report_does_not_go_to_the_terminal(run: Run) -> None:
    code, _, err = run("no-such-model", "--html", "-")
    assert code == 2
    assert "--html -" in err


def test_the_parser_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from slotzero.cli import certify\n"
        "certify.parser().format_help()\n"
        "print(*{'torch', 'numpy', 'rich', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# Failures


@pytest.mark.usefixtures("unpadded")
def test_a_missing_pad_is_named_everywhere(run: Run, tmp_path: Path) -> None:
    files = tmp_path / "a.json", tmp_path / "a.html"
    code, out, _ = run(*TINY, "--quick", "--json", str(files[0]), "--html", str(files[1]))
    assert code == 1
    assert "FAIL" in out
    line = next(line for line in out.splitlines() if line.startswith("FAILED"))
    for word in ("runner decode", "decode[1]", "S1", "'slots'", RULES["S1"]):
        assert word in line
    assert out.splitlines()[-1].startswith("NOT passed")

    report = json.loads(files[0].read_text())
    assert report["passed"] is False
    failure = report["failures"][0]
    assert (failure["runner"], failure["size"]) == ("decode", "decode[1]")
    assert (failure["check"], failure["tensor"]) == ("S1", "slots")
    assert "row" in failure
    assert failure["found"] in line
    assert failure["rule"] == RULES["S1"]
    failed = {failure["runner"] for failure in report["failures"]}
    # S11 uploads, too: "engine"
    assert failed == {"decode", "prefill", "pooled prefill", "scored prefill", "engine"}

    text = Page(files[1].read_text(encoding="utf-8")).text
    for word in ("NOT passed", "decode[1]", "check S1", "slots", failure["found"], RULES["S1"]):
        assert word in text


def test_a_value_that_the_host_reads_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a size cannot be recorded and runs eagerly, so only the trace can find it."""
    right = CpuKernels.embed

    def embed(self: CpuKernels, tokens: Tokens, *more: Any) -> Any:
        tokens.slots.tolist()
        return right(self, tokens, *more)

    monkeypatch.setattr(CpuKernels, "embed", embed)
    with pytest.warns(UserWarning, match="could not be recorded.*: Tensor.tolist cannot be"):
        code, out, _ = run(*small(seqs=1), "--quick", "--backend", "cpu")
    assert code == 1
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    for line in failed:
        for word in ("S5", "'token_slots'", "Tensor.tolist: the host reads its value", RULES["S5"]):
            assert word in line
    assert len(failed) == 4


@pytest.mark.usefixtures("unpadded")
def test_an_engine_that_fails_is_not_mutated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "mutate", None)
    code, out, _ = run(*TINY, "--mutate", "--json", "-")
    report = json.loads(out)
    assert (code, report["passed"], report["mutants"]) == (1, False, 0)


Break = Callable[[pytest.MonkeyPatch], None]


def writes_padding(patch: pytest.MonkeyPatch) -> None:
    put = torch_speculation.put
    patch.setattr(
        torch_speculation, "put", lambda *given: put(*given[:3], torch.ones_like(given[3]))
    )


def takes_all_tokens_for_real(patch: pytest.MonkeyPatch) -> None:
    """Inject a fault: padded tokens after the last draft count as real."""
    right = torch_speculation.lay_out

    def lay_out(slots: Tensor, starts: Tensor, counts: Tensor, tokens: Tokens) -> Rows:
        width = len(tokens.slots) // len(slots)
        return right(slots, starts, (slots > 0).int() * width, tokens)

    patch.setattr(torch_speculation, "lay_out", lay_out)


def drafts_from_the_token_after(patch: pytest.MonkeyPatch) -> None:
    right = EagleDrafter.extend

    def extend(self: EagleDrafter, inputs: DrafterInputs, pieces: Pieces) -> None:
        last = (inputs.last + 1).clamp_max(len(inputs.tokens.slots) - 1)
        right(self, inputs._replace(last=last), pieces)

    patch.setattr(EagleDrafter, "extend", extend)


def drafts_without_pages(patch: pytest.MonkeyPatch) -> None:
    right = EagleDrafter.draft

    def draft(
        self: EagleDrafter, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        return right(self, slots, length, (slots > 0).int() * steps, steps, pieces)

    patch.setattr(EagleDrafter, "draft", draft)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (writes_padding, {("decode", "S4", "features"), ("draft-5", "S4", "drafted_at")}),
        (takes_all_tokens_for_real, {("verify-5", "S1", "tokens"), ("verify-5", "S1", "kv_full")}),
        (drafts_from_the_token_after, {("draft-extend-5", "S1", "features")}),
        (drafts_without_pages, {("draft-5", "S4", "kv_draft")}),
    ],
)
def test_a_drafter_that_is_wrong_is_named(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    broken: Break,
    found: set[tuple[str, str, str]],
) -> None:
    broken(monkeypatch)
    code, out, _ = run(*TINY, *EAGLE3, "--quick", "--json", "-")
    failures = json.loads(out)["failures"]
    assert code == 1
    assert found <= {(f["runner"], f["check"], f["tensor"]) for f in failures}


# Which sizes


@pytest.mark.parametrize(
    "words",
    [
        [*TINY],
        [*TINY, "--quick"],
        [*TINY, "--pooling", "mean"],
        [*small("qwen3-next"), *EAGER, "--pooling", "mean", "--quick"],
        [*TINY, "--score-tokens", "n,y", "--quick"],
        [*small(seqs=2), "--backend", "cpu", "--quick"],
        [*small(seqs=2), "--backend", "cpu", "--quick", *EAGLE3],
    ],
)
def test_no_runner_is_forgotten(run: Run, engines: list[Engine], words: list[str]) -> None:
    code, out, _ = run(*words, "--json", "-")
    (engine,) = engines
    assert code == 0
    assert json.loads(out)["runners"] == [r.spec.name for r in engine.worker.runners]
    engine.check()


@pytest.mark.parametrize(("drafter", "widths"), [(EAGLE3, [5]), (NGRAM, [3, 5])])
def test_every_size_and_width_is_tried(run: Run, drafter: list[str], widths: list[int]) -> None:
    code, out, _ = run(*TINY, *drafter)
    assert code == 0, out
    for width, kind in product(widths, ("verify", "draft-extend", "draft")):
        lines = [line for line in out.splitlines() if line.startswith(f"│ {kind}-{width}[")]
        assert [line.split("x ")[1][0] for line in lines] == ["1", "2", "4"]
        assert all(line.count(" ok ") == len(CHECKS) for line in lines)
    # three sizes belong to the pass that catches up
    assert f"passed: {12 + 3 + 9 * len(widths)} of " in out


@pytest.mark.parametrize(
    "drafter",
    [
        NGRAM,
        ["--speculative", "eagle", "--speculative-steps", "1"],
        ["--speculative", "draft", "--speculative-model", "tiny:llama", "--speculative-steps", "1"],
    ],
)
def test_every_drafter_passes_with_rows_of_every_kind(run: Run, drafter: list[str]) -> None:
    code, out, _ = run(*small(seqs=16), *EAGER, *drafter, "--quick")
    assert code == 0, out


MTP = ["--speculative", "mtp", "--no-speculative-adaptive", "--speculative-steps"]
SMALLEST = {"seqs": 7, "tokens": 16}


def test_an_assistant_without_kv_passes(run: Run) -> None:
    assistant = ["--speculative-model", "tiny:gemma4-assistant"]
    code, out, _ = run(*small("gemma4", **SMALLEST), *EAGER, *MTP, "2", *assistant, "--quick")
    assert code == 0, out


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_mtp_layers_pass(run: Run, monkeypatch: pytest.MonkeyPatch, num_layers: int) -> None:
    config = {**tiny_configs()["deepseek-v3"], "num_nextn_predict_layers": num_layers}
    monkeypatch.setitem(families()["DeepseekV3ForCausalLM"].tiny, "deepseek-v3", config)
    words = [*small("deepseek-v3", **SMALLEST), *EAGER, *MTP, str(max(2, num_layers)), "--quick"]
    code, out, _ = run(*words, "--json", "-")
    report = json.loads(out)
    assert (code, report["failures"]) == (0, [])
    assert {f"draft-{max(2, num_layers) + 1}", "draft-extend-16"} <= {*report["runners"]}


def test_stored_experts_pass(run: Run) -> None:
    """Their pages are those of the KV, and slot 0 writes to none, whatever its page table holds."""
    routed = "--enable-return-routed-experts", "--speculative", "ngram"
    code, out, _ = run(*small("qwen3-moe"), *routed, "--quick")
    assert (code, "FAIL" in out) == (0, False)


def test_an_mtp_layer_that_overwrites_the_previous_one_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**tiny_configs()["deepseek-v3"], "num_nextn_predict_layers": 2}
    monkeypatch.setitem(families()["DeepseekV3ForCausalLM"].tiny, "deepseek-v3", config)
    monkeypatch.setattr(eagle, "_one_before", lambda *given: given)
    code, out, _ = run(
        *small("deepseek-v3", **SMALLEST), *EAGER, *MTP, "2", "--quick", "--json", "-"
    )
    found = {(f["runner"], f["check"], f["tensor"]) for f in json.loads(out)["failures"]}
    assert code == 1
    assert ("draft-extend-3", "S4", "kv_draft") in found


def test_scenarios_of_drafts_have_rows_of_every_kind() -> None:
    config = EngineConfig(
        model="tiny:llama", backend="eager", speculative="ngram", max_num_seqs=16,
        lazy_recording=True, skip_tokenizer_init=True, show_progress=False, kv_cache_memory=4 << 20,
    )  # fmt: skip
    engine = Engine(config)
    verify, _, draft = engine.worker.cycles[5]
    outcomes = {}
    for runner in (verify, draft):
        key = next(iter(runner.all_keys()))
        runner.prepare(key)
        with scenario_for(engine, runner, key) as scenario:
            outcomes[runner] = Trial(runner, scenario).replay()
    tried, right = (outcomes[verify].tensors[name] for name in ("verify_len", "num_confirmed"))
    pairs = set(zip(tried.tolist(), right.tolist(), strict=True))
    assert {(5, 5), (5, 3), (5, 1), (2, 2), (1, 1), (0, 0)} <= pairs
    drafted = outcomes[draft].tensors["num_drafts"][list(outcomes[draft].slots)]
    assert set(drafted.tolist()) == {4, 1, 0}
    engine.check()


def test_a_width_that_the_context_cannot_hold_is_skipped(run: Run) -> None:
    code, out, _ = run(*TINY, *EAGLE3, "--max-model-len", "8", "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert "no room for 5 tokens" in report["left_out"]["draft-5[20t x 4r]"]


def test_quick_reports_what_it_skips(run: Run) -> None:
    _, out, _ = run(*TINY, "--quick")
    _, text, _ = run(*TINY, "--quick", "--json", "-")
    said = json.loads(text)["left_out"]
    assert said["decode[4] S5"] == "--quick runs it only at decode[1]"
    assert "decode[2]" not in out
    assert "decode: 2 of 3 sizes checked: --quick" in out
    assert "prefill: 1 of 12 sizes checked: --quick" in out
    assert "decode[4]: S5: --quick runs it only at decode[1]" in out
    assert any(line.startswith("│ decode[4]") and " - " in line for line in out.splitlines())


def test_few_and_all_sizes() -> None:
    decode, prefill = runner_of("decode"), runner_of("prefill")
    few = list(few_sizes([decode, prefill]))
    assert [str(key) for _, key in few] == ["decode[1]", "decode[8]", "prefill[16t x 1r]"]
    assert [(str(key), check) for key, check in few_checks(few)] == [("decode[8]", "S5")]
    every = list(all_sizes([decode, prefill]))
    assert [key.rows for runner, key in every if runner is decode] == [1, 2, 4, 8]
    assert list(left_out([decode], every, is_quick=False)) == []
    assert list(left_out([decode, prefill], few, is_quick=True)) == ["decode", "prefill"]


def test_a_runner_of_one_size_is_tried_once() -> None:
    assert [str(key) for _, key in few_sizes([runner_of("decode", 1)])] == ["decode[1]"]


def test_a_poisoned_page_table_names_no_page_of_another_row(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a row has one page, the poison in page tables could be a page of the slot itself."""
    monkeypatch.setattr(synthetic_requests, "MOST_STORED", 3)
    code, out, _ = run(*TINY)
    assert code == 0, out


def test_a_step_that_the_context_cannot_hold_is_skipped(run: Run) -> None:
    code, out, _ = run(*TINY, "--max-model-len", "48", "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert "prefill[16t x 1r]" in report["sizes"]
    assert not set(report["sizes"]) & set(report["left_out"])


# Mutation


def mutant(tensor: str, fault: str, caught_by: str = "S1", named: str = "", **more: Any) -> Mutant:
    names = (named or tensor,) if caught_by else ()
    return Mutant(more.get("runner", "decode"), tensor, fault, more.get("numbers", ()), caught_by,
                  names)  # fmt: skip


CAUGHT = [
    mutant("slots", "skip the pad", numbers=("SGLang 26292", "SGLang 23037")),
    mutant("counts", "skip the pad", "S4", runner="prefill"),
    *(mutant("slots", f"fault {i}", "S6") for i in range(12)),
]
ODD = mutant("positions", "off by one", "S2", named="kv_full")
LOST = mutant("logits", "wrong axis", "", numbers=("SGLang 22229",))


def fake(monkeypatch: pytest.MonkeyPatch, results: list[Mutant]) -> None:
    def mutate(engine: Engine, seen: Callable[[Mutant], None]) -> list[Mutant]:
        for result in results:
            seen(result)
        return results

    monkeypatch.setattr(session, "mutate", mutate)
    for name in ("mutate_copies", "mutate_traffic"):
        monkeypatch.setattr(session, name, lambda engine, seen: [])


def test_mutation_passes_if_every_mutant_is_caught(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, [*CAUGHT, ODD])
    code, out, err = run(*TINY, "--mutate", "--json", "-")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["passed"] is True
    assert len(report["sizes"]) == 5
    assert (report["mutants"], report["caught"], report["named"]) == (15, 15, 14)
    assert report["mutation"][0] == {
        "runner": "decode",
        "tensor": "slots",
        "fault": "skip the pad",
        "numbers": ["SGLang 26292", "SGLang 23037"],
        "caught_by": "S1",
        "named": ["slots"],
        "caught": True,
        "is_named": True,
    }


def test_a_mutant_that_is_missed_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch, [*CAUGHT, ODD, LOST])
    page = tmp_path / "a.html"
    code, out, _ = run(*TINY, "--mutate", "--html", str(page))
    assert code == 1
    assert "passed: 5 of 39 sizes" in out
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    assert ["SGLang", "26292", "decode", "slots", "skip", "the", "pad", "S1"] in lines
    assert ["SGLang", "22229", "decode", "logits", "wrong", "axis", "MISSED"] in lines
    assert ["positions", "S2?"] in lines
    assert ["slots", *["S1"], *["S6"] * 9] in lines
    assert ["slots", *["S6"] * 3] in lines
    assert out.splitlines()[-1] == "15 of 16 mutants were caught, 14 with the right tensor"
    text = Page(page.read_text(encoding="utf-8")).text
    for word in ("15 of 16 were caught, 14", "SGLang 22229", "MISSED", "S2?", "skip the pad"):
        assert word in text


# The HTML report


class Page(HTMLParser):
    """Parser that collects the text of a page and checks that every tag is closed."""

    VOID = ("meta", "rect")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.open = "", []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def certificate() -> Certificate:
    failure = Violation("S4", "<run>", "<run>[2]", "ta&ble", "<nan> where 0 was expected", 3)
    return Certificate(
        "a<b>c",
        "cpu",
        [
            Cell("<run>", "<run>[1]", "S1", 0.25),
            Cell("<run>", "<run>[1]", "S5", 0.0, left_out="too <slow>"),
            Cell("<run>", "<run>[2]", "S4", 0.5, (failure,)),
        ],
        uncertified={"<run>": "2 of 3 & why"},
        num_all_sizes=165,
    )


def test_a_page_is_self_contained_and_escaped() -> None:
    source = html(certificate(), [*CAUGHT, LOST])
    for outside in ("http:", "https:", "<script", "src=", "@import", "url("):
        assert outside not in source
    for raw in ("<b>", "<run>", "ta&ble", "<slow>", "<nan>"):
        assert raw not in source
        assert raw in Page(source).text
    for rule in RULES.values():
        assert rule in Page(source).text
    assert "ta&ble, row 3" in Page(source).text


def test_a_page_says_how_many_sizes_were_tried() -> None:
    assert "<h2>Checks of 2 of 165 sizes</h2>" in html(certificate(), None)
    assert certificate().as_json()["num_all_sizes"] == 165


def test_the_picture_has_a_cell_for_every_size_and_check() -> None:
    source = html(certificate(), None)
    assert source.count("<rect ") == 2 * len(CHECKS)
    assert source.count('<rect class="ok"') == 1
    assert source.count('<rect class="bad"') == 1
    assert "Injected faults" not in source


def test_a_page_without_results_is_valid() -> None:
    assert "NOT passed" in Page(html(Certificate("m", "cpu"), [])).text
