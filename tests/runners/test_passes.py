"""Tests that padded rows change nothing: whole steps over hostile memory, eager and captured."""

import pytest
import torch
from traced import Traced, prompts_of

from slotzero.graph import TensorKind
from slotzero.sampling.tables import SAMPLING_TABLES, mask_tables

pytestmark = pytest.mark.slow

BACKENDS = pytest.mark.parametrize("backend", ["eager", "cpu"])


@BACKENDS
def test_rows_of_slot_0_are_zero_in_every_output(oracles, backend):
    oracle = oracles("llama")
    traced = Traced(oracle.path, backend=backend, max_num_seqs=4)
    registry = traced.engine.worker.registry
    written = traced.engine.worker.decode.spec.writes  # not the scores of prompts
    entries = [entry for entry in registry.entries() if entry.name in written]
    outputs = [entry for entry in entries if entry.kind is TensorKind.OUTPUT]
    for entry in outputs:
        entry.tensor.fill_(7)
    traced.generate(prompts_of([5, 30, 17], oracle.vocab_size))  # three rows, replayed in size 4
    assert {entry.name for entry in outputs} >= {"sampled", "logits", "logprobs", "top_ids"}
    for entry in outputs:
        assert entry.tensor[3].abs().max() == 0, entry.name


@BACKENDS
def test_slot_0_and_page_0_never_change(oracles, backend):
    oracle = oracles("qwen3")
    traced = Traced(oracle.path, backend=backend, max_num_seqs=5, max_num_batched_tokens=40)
    traced.generate(prompts_of([5, 30, 17, 90, 61], oracle.vocab_size))
    tables = traced.engine.worker.tables
    for name in ("tokens", "length", "target", "page_table"):
        assert tables[name][0].abs().max() == 0, name
    for spec in (*SAMPLING_TABLES, *mask_tables(1)):
        assert (tables[spec.name][0] == spec.neutral).all(), spec.name
    assert traced.engine.worker.registry["kv_full"][:, 0].abs().max() == 0


@BACKENDS
def test_hostile_memory_changes_no_real_row(oracles, backend):
    """Before every step, free pages, derived tensors and outputs are filled with NaN and huge
    ids."""
    oracle = oracles("smollm2")
    prompts = prompts_of([5, 30, 17], oracle.vocab_size)
    clean = Traced(oracle.path, backend=backend, max_num_seqs=4)
    clean.generate(prompts)
    hostile = Traced(oracle.path, backend=backend, max_num_seqs=4)
    registry = hostile.engine.worker.registry
    registry["kv_full"][:, 1:] = torch.nan
    run = hostile.engine.worker.run

    def poisoned(step):
        for entry in registry.entries():
            if entry.kind in (TensorKind.DERIVED, TensorKind.OUTPUT):
                entry.tensor.fill_(torch.nan if entry.tensor.is_floating_point() else 2**30)
        return run(step)

    hostile.engine.worker.run = poisoned
    hostile.generate(prompts)
    for one, other in zip(clean.request_ids, hostile.request_ids, strict=True):
        assert torch.equal(torch.stack(clean.logits[one]), torch.stack(hostile.logits[other]))
