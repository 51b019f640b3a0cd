"""Tests of the example certify_your_own.py: it certifies a sound model, and names a fault."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from certify_your_own import Counters, certificate_of, main


def test_a_sound_model_is_certified():
    certificate = certificate_of(Counters())
    assert certificate.passed
    assert certificate.sizes == ["count[1]", "count[2]", "count[4]", "count[8]"]


@pytest.mark.parametrize("pad", [1, 5])
def test_a_pad_that_may_be_a_used_slot_is_named(pad):
    certificate = certificate_of(Counters(pad=pad))
    assert not certificate.passed
    assert {violation.tensor for violation in certificate.violations} >= {"counts"}
    assert {violation.size for violation in certificate.violations} <= {"count[4]", "count[8]"}


def test_the_example_prints_its_findings(capsys):
    main()
    out = capsys.readouterr().out
    assert out.startswith("certified\nbroken\n")
    assert "tensor 'counts', row 1" in out
    assert "published tensor 'slots' was not published in step" in out
