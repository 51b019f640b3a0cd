"""Tests of S10 on the CPU: batch invariance in every tiny family, and its faults."""

import pytest
from traffic import engine_of

from slotzero.certify import session
from slotzero.certify.batch_invariance import ROUNDS, Round, check_batch_invariance, random_requests
from slotzero.certify.order_faults import ORDER_FAULTS, mutate_order
from slotzero.certify.report import Violation
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.engine.engine import Engine
from slotzero.kernels.cpu.build import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="the kernels need a C++ compiler"),
]

SETTINGS = {"deterministic": True, "snapshot_interval": 16, "kv_cache_memory": 1 << 22}
EVERYTHING = (
    Round("all at once"),
    Round("mixed", is_reversed=True, is_staggered=True, is_preempted=True, keeps_cache=True),
)


@pytest.mark.parametrize("family", tiny_configs())
def test_a_batch_changes_no_bit(family):
    """Prompts are longer than a step, and prefixes are found in the cache."""
    engine = engine_of(family, "wide", backend="eager", **SETTINGS)
    assert engine.limits.is_deterministic
    assert check_batch_invariance(engine, EVERYTHING, random_requests(engine, 3)) == []
    assert engine.schedulers.num_preemptions


def test_a_batch_changes_no_bit_of_recorded_steps():
    engine = engine_of("llama", "wide", backend="cpu", **SETTINGS | {"max_num_seqs": 2})
    assert check_batch_invariance(engine, EVERYTHING, random_requests(engine, 3)) == []


@pytest.mark.parametrize("family", ["llama", "falcon-h1"])
def test_a_batch_with_drafts_changes_no_bit(family):
    """Alone there are no drafts; in the rounds some are right and some wrong."""
    more = {"speculative": "ngram", "speculative_steps": 2}
    engine = engine_of(family, "wide", backend="eager", **SETTINGS, **more)
    assert check_batch_invariance(engine, EVERYTHING, random_requests(engine, 4)) == []
    assert 0 < engine.speculation.num_accepted_tokens < engine.speculation.num_draft_tokens


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_faults_of_the_order_of_summation_are_named(family):
    engine = engine_of(family, "wide", backend="eager", deterministic=True)
    mutants = mutate_order(engine)
    assert [mutant.fault for mutant in mutants] == [fault.name for fault in ORDER_FAULTS]
    assert all(mutant.caught_by == "S10" and mutant.is_named for mutant in mutants)
    assert check_batch_invariance(engine, ROUNDS[:1]) == []  # everything is put back


def test_its_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def served(engine: Engine) -> list[Violation]:
        now[0] += 7
        return []

    monkeypatch.setattr(session, "certify", lambda certificate, *_, **__: certificate)
    monkeypatch.setattr(session, "check_batch_invariance", served)
    monkeypatch.setattr(session.time, "perf_counter", lambda: now[0])
    engine = engine_of("llama", "wide", backend="eager", **SETTINGS)
    made = session.CertifySession(engine, "tiny:llama", is_quick=True, is_deterministic=True)
    certificate = made.certify()
    assert certificate.batch_invariance is not None
    assert (certificate.batch_invariance.seconds, certificate.seconds) == (7, 7)
