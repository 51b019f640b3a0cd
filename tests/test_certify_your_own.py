"""Tests of the examples that certify functions of other engines: what is unsafe is named."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import certify_a_decode_step as decode
import certify_an_mlp as mlp

import slotzero
from slotzero.certify import Certificate, Input, certify_captured

EXAMPLES = Path(__file__).parents[1] / "examples"
ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "gguf", "huggingface_hub", "jinja2", "llguidance",
                "msgspec", "prometheus_client", "ray", "rich", "safetensors", "tokenizers",
                "transformers", "triton", "uvicorn"}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Blocked())
import certify_a_decode_step
certify_a_decode_step.main()
"""


def named(certificate: Certificate, check: str) -> set[str]:
    return {found.tensor for found in certificate.violations if found.check == check}


def test_the_usual_padding_of_a_decode_step_is_not_safe() -> None:
    certificate = decode.certificate_of(is_mended=False)
    assert not certificate.passed
    assert named(certificate, "S1") == {"input_ids", "positions"}, "they set the batch's scale"
    assert named(certificate, "S3") == {"k_cache", "v_cache", "logits"}
    assert named(certificate, "S4") == {"k_cache", "v_cache"}, "-1 is the last slot for torch"
    last = decode.NUM_BLOCKS * decode.BLOCK - 1
    assert {v.row for v in certificate.violations if v.check == "S4"} == {last}
    assert {v.size for v in certificate.violations} == {"decode[4]", "decode[8]"}
    assert named(certificate, "S0") == set()


def test_the_mended_decode_step_is_certified() -> None:
    certificate = decode.certificate_of(is_mended=True)
    assert certificate.passed, str(certificate)
    assert certificate.sizes == ["decode[1]", "decode[2]", "decode[4]", "decode[8]"]
    assert not any(cell.left_out for cell in certificate.cells)


class Faulty(decode.DecodeStep):
    """The mended step with a fault in how a batch is written to the buffers."""

    def __init__(self, fault: str) -> None:
        super().__init__(is_mended=True)
        self.fault = fault

    def stage(self, seqs: Sequence[decode.SequenceState], size: int) -> None:
        kept = getattr(self, self.fault).clone()
        super().stage(seqs, size)
        getattr(self, self.fault)[len(seqs) :] = kept[len(seqs) :]


@pytest.mark.parametrize(
    "tensor", ["input_ids", "positions", "slot_mapping", "context_lens", "block_tables"]
)
def test_a_tail_that_is_left_as_a_larger_batch_wrote_it_is_named(tensor: str) -> None:
    step = Faulty(tensor)
    certificate = certify_captured(step.declared(), decode.sequences(True), decode.BOUNDS)
    assert named(certificate, "S0") == {tensor}
    writes = {"k_cache", "v_cache"} if tensor == "slot_mapping" else set()
    assert named(certificate, "S4") == writes


def test_padded_rows_that_attend_to_block_0_of_a_live_sequence_are_found() -> None:
    """The padding of engines whose attention needs one token of every row: length 1, block 0."""
    step = decode.DecodeStep(is_mended=False)

    def stage(seqs: Sequence[decode.SequenceState], size: int) -> None:
        for buffer in (step.input_ids, step.positions, step.block_tables):
            buffer.zero_()
        step.stage(seqs, size)
        step.context_lens[len(seqs) :] = 1

    def padded(one: Input) -> Input:
        return replace(one, pad={"slot_mapping": -1, "context_lens": 1}.get(one.name, 0))

    declared = step.declared()
    tensors = [padded(one) if isinstance(one, Input) else one for one in declared.tensors]
    live_last = decode.sequences(is_mended=False)[::-1]  # block 0 is that of one that never runs
    faulty = replace(declared, tensors=tensors, stage=stage)
    certificate = certify_captured(faulty, live_last, decode.BOUNDS)
    assert named(certificate, "S0") == set()
    assert {"k_cache", "v_cache"} <= named(certificate, "S1")


def test_an_mlp_is_certified_and_one_with_a_mean_over_the_batch_is_not() -> None:
    certificate = mlp.certificate_of(is_centred=False)
    assert certificate.passed, str(certificate)
    assert certificate.sizes == ["mlp[1]", "mlp[4]", "mlp[8]"]
    certificate = mlp.certificate_of(is_centred=True)
    assert named(certificate, "S2") == named(certificate, "S3") == {"y"}


@pytest.mark.slow
def test_the_certificate_needs_torch_alone() -> None:
    path = [str(EXAMPLES), str(Path(slotzero.__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {path!r}\n{ALONE}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "decode on cpu: NOT passed, 4 of 4 sizes" in done.stdout
    assert "decode on cpu: passed, 4 of 4 sizes" in done.stdout
