"""Tests of who may use the routes for administrators, and of what they refuse."""

import base64
from typing import Any

import pytest
from fake_engine import COMPLETION, FakeClient, ask, refused

from slotzero.errors import ConfigError, RequestRefusedError
from slotzero.server.messages import Pause, ResetPrefixCache, Resume, UpdateWeights
from slotzero.server.settings import ServerSettings

ON = {"enable_admin": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_routes_are_off_by_default() -> None:
    for path in ("/pause", "/load_weights", "/reset_prefix_cache"):
        message = refused(path, {}, status=404)["message"]
        assert message == f"{path} is off: start the server with --enable-admin"


def test_the_routes_are_documented_where_they_are_on() -> None:
    for is_on in (True, False):
        paths = ask(FakeClient(), "/openapi.json", enable_admin=is_on).json()["paths"]
        assert "/generate" in paths
        for path in ("/load_weights", "/flush_cache", "/finish_weight_update", "/sleep"):
            assert (path in paths) == is_on


def test_actions_reach_the_engines() -> None:
    client = FakeClient()
    assert ask(client, "/reset_prefix_cache", method="POST", **ON).json() == {}
    assert ask(client, "/pause?mode=wait", method="POST", **ON).json() == {"status": "paused"}
    assert client.restores == (Pause("hold"),)
    assert ask(client, "/resume", method="POST", **ON).json() == {"status": "resumed"}
    body = {"path": "/folder", "running": "abort", "weight_version": "b"}
    assert ask(client, "/load_weights", body, **ON).json() == {"weight_version": "b"}
    update = UpdateWeights("/folder", False, "abort", "b")
    assert client.actions == [ResetPrefixCache(), Pause("finish"), Resume(), update]
    assert client.restores == (update,)
    assert ask(client, "/load_weights", {"path": "/x.safetensors"}, **ON).status_code == 200
    assert client.actions[-1] == UpdateWeights("/x.safetensors", True, "hold", "1")
    assert "came as tensors" in client.lost_weights


@pytest.mark.parametrize(
    ("keys", "sent", "status"),
    [
        ({}, {}, 200),
        ({}, {"Origin": "https://a.example"}, 401),
        ({}, {"Sec-Fetch-Site": "cross-site"}, 401),
        ({}, {"Sec-Fetch-Site": "none"}, 200),
        ({"api_key": ["a"]}, {}, 401),
        ({"api_key": ["a"]}, bearer("a"), 200),
        ({"admin_api_key": ["b"]}, {}, 401),
        ({"admin_api_key": ["b"]}, bearer("b"), 200),
        ({"api_key": ["a"], "admin_api_key": ["b"]}, bearer("a"), 401),
        ({"api_key": ["a"], "admin_api_key": ["b"]}, bearer("b"), 200),
        ({"api_key": ["a"]}, {"X-Api-Key": "a"}, 200),
        (
            {"admin_api_key": ["b:c"]},
            {"Authorization": "Basic " + base64.b64encode(b"user:b:c").decode()},
            200,
        ),
        ({"admin_api_key": ["b"]}, {"Authorization": "Basic ?"}, 401),
    ],
)
def test_keys(keys: dict[str, Any], sent: dict[str, str], status: int) -> None:
    client = FakeClient()
    made = ask(client, "/resume", method="POST", headers=sent, **ON, **keys)
    assert made.status_code == status
    assert client.actions == [Resume()] * (status == 200)


def test_an_admin_key_opens_all_routes_and_does_not_close_them() -> None:
    keys = {"api_key": ["a"], "admin_api_key": ["b"]}
    for key, status in (("a", 200), ("b", 200), ("c", 401)):
        made = ask(FakeClient(), "/v1/completions", COMPLETION, headers=bearer(key), **ON, **keys)
        assert made.status_code == status
    alone = {"admin_api_key": ["b"]}
    assert ask(FakeClient(), "/v1/completions", COMPLETION, **ON, **alone).status_code == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"admin_api_key": ["a"]}, "no effect without enable_admin"),
        ({"enable_admin": True, "admin_api_key": ["a b"]}, "visible ASCII"),
        ({"enable_admin": True, "host": "0.0.0.0"}, "needs admin_api_key or api_key"),
    ],
)
def test_unsafe_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**given)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/load_weights", {}, "path"),
        ("/load_weights", {"path": ""}, "path"),
        ("/load_weights", {"path": "a", "running": "wait"}, "running"),
        ("/load_weights", {"path": "a", "weight_version": "\n"}, "weight_version"),
        ("/load_weights", {"path": "a", "version": "1"}, "version"),
        ("/pause?mode=stop", None, "mode"),
    ],
)
def test_bad_input(path: str, body: Any, param: str) -> None:
    client = FakeClient()
    response = ask(client, path, body, method="POST", **ON)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not client.actions


def test_a_refusal_of_an_engine_is_answered() -> None:
    client = FakeClient()
    client.action_error = RequestRefusedError("InvalidInputError", "tensor a is missing")
    assert refused("/load_weights", {"path": "a"}, client, **ON)["message"] == "tensor a is missing"
    assert ask(client, "/weight_info", **ON).json() == {"weight_version": "0"}
    assert client.restores == ()
