"""The connector against the recorded API: what it overrides must fit, what it must define is there."""

import inspect
import pathlib

import fakes
import pytest

from kvport_vllm.connector import KvportConnector

RECORDINGS = sorted((pathlib.Path(__file__).parent / "recorded").glob("*.json"))
# Members that only some versions have, and that the connector defines for those.
OPTIONAL = {"get_finished", "request_finished", "bind_gpu_block_pool"}


def misfit(ours, theirs):
    """Say why a call that vLLM makes by their signature would not fit ours; "" if it does."""
    mine = list(inspect.signature(ours).parameters.values())
    star = any(p.kind is p.VAR_POSITIONAL for p in mine)
    double = any(p.kind is p.VAR_KEYWORD for p in mine)
    named = [p for p in mine if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    wanted = [p for p in theirs if p["kind"] in ("POSITIONAL_OR_KEYWORD", "POSITIONAL_ONLY")]
    if len(named) < len(wanted) and not star:
        return f"takes {len(named)} arguments, vLLM passes up to {len(wanted)}"
    for have, want in zip(named[1:], wanted[1:], strict=False):
        if have.name != want["name"]:
            return f"calls {have.name} what vLLM calls {want['name']}"
    for extra in named[len(wanted) :]:
        if extra.default is extra.empty:
            return f"needs {extra.name}, which vLLM does not pass"
    if any(p["kind"] == "VAR_KEYWORD" for p in theirs) and not double:
        return "does not take the keywords that vLLM may pass"
    return ""


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.stem)
def test_overrides_fit(path):
    api = fakes.recorded(path)
    members = {**api["SupportsHMA"]["members"], **api["KVConnectorBase_V1"]["members"]}
    checked = 0
    for name, raw in vars(KvportConnector).items():
        theirs = members.get(name)
        if theirs is None:
            continue
        if isinstance(raw, property):
            assert theirs["kind"] == "property", name
            continue
        function = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
        if not inspect.isfunction(function):
            continue
        kind = "classmethod" if isinstance(raw, classmethod) else "method"
        assert theirs["kind"] == kind, name
        assert misfit(function, theirs["parameters"]) == "", name
        checked += 1
    assert checked >= 25


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.stem)
def test_abstract_members_are_defined(path):
    api = fakes.recorded(path)
    for owner in ("KVConnectorBase_V1", "SupportsHMA"):
        for name, m in api[owner]["members"].items():
            if m.get("abstract"):
                assert name in vars(KvportConnector), name


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.stem)
def test_nothing_public_is_defined_that_vllm_does_not_call(path):
    api = fakes.recorded(path)
    members = {**api["SupportsHMA"]["members"], **api["KVConnectorBase_V1"]["members"]}
    ours = {n for n in vars(KvportConnector) if not n.startswith("_")}
    assert ours - set(members) - OPTIONAL == set()


def test_a_misfit_is_seen():
    theirs = fakes.API["KVConnectorBase_V1"]["members"]["get_num_new_matched_tokens"]["parameters"]
    assert misfit(lambda self, request: None, theirs)
    assert misfit(lambda self, request, computed: None, theirs)
    assert misfit(lambda self, request, num_computed_tokens, more: None, theirs)
    assert misfit(lambda self, request, num_computed_tokens, more=1: None, theirs) == ""


def test_pool_has_what_pins_need():
    members = fakes.API["BlockPool"]
    assert {"touch", "free_blocks", "evict_blocks", "get_cached_block"} <= set(members["members"])
    assert [p["name"] for p in members["members"]["get_cached_block"]["parameters"]] == ["self", "block_hash", "kv_cache_group_ids"]
    assert {"blocks", "null_block"} <= set(members["fields"])
    assert {"block_id", "ref_cnt"} <= set(fakes.API["KVCacheBlock"]["fields"])


def test_statuses_are_known():
    from kvport_vllm.connector import _REASONS

    assert set(_REASONS) <= set(fakes.API["RequestStatus"]["fields"])
