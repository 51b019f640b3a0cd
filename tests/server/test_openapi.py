"""Test with random requests from the server's OpenAPI document: replies are as documented."""

from typing import Any

import pytest
from fake_engine import FakeClient, app_of
from hypothesis import HealthCheck, given, settings

from slotzero.server.protocol import NEUTRAL

pytestmark = pytest.mark.slow


def test_every_reply_is_as_documented() -> None:
    import schemathesis  # here, because it takes seconds, and every process collects this file
    from schemathesis.checks import CHECKS

    document = schemathesis.openapi.from_asgi("/openapi.json", app_of(FakeClient("ok")))
    # dependencies between fields, which a schema cannot express, are refused with 400
    excluded = [CHECKS.get_one("positive_data_acceptance")]

    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body = {k: v for k, v in case.body.items() if k not in NEUTRAL} | {"model": "tiny"}
        response = case.call()
        assert response.status_code < 500
        case.validate_response(response, excluded_checks=excluded)

    quick = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    tried = set()
    chosen = document.exclude(path="/live").exclude(path_regex="/v1/messages")
    for operation in (found.ok() for found in chosen.get_all_operations()):
        quick(given(case=operation.as_strategy())(check))()
        tried.add(operation.path)
    assert {"/v1/chat/completions", "/v1/completions", "/health"} <= tried
