"""What engines of SGLang must have in common to share pages."""

import sys
import types

import pytest
import sglang_engine as rig
import sglang_fakes as fakes

fakes.install()

from kvport_agent.content import ContentCache  # noqa: E402
from kvport_agent.errors import UnsupportedError  # noqa: E402
from kvport_sglang import fingerprint  # noqa: E402

PAGES = list(range(20))


@pytest.fixture
def args(here, server_args):
    """Arguments of a server with a model that is here."""
    return server_args(model_path=str(rig.model(here)))


@pytest.fixture
def made(here):
    """Make the fingerprint of the model."""
    cache = ContentCache(here / "contents")
    return lambda: fingerprint.model(fakes.storage_config({}, "served"), cache)


@pytest.fixture
def listed(monkeypatch):
    """Have SGLang list some arguments beside the model's."""
    model = types.SimpleNamespace(__struct_fields__=("an_argument_of_tomorrow", "download_dir"))
    monkeypatch.setitem(sys.modules, fingerprint._FIELDS, types.SimpleNamespace(Model=model))


@pytest.mark.parametrize("field", fingerprint._DECIDE)
def test_each_argument_decides(args, made, field):
    before = made()
    setattr(args, field, "another")
    assert made() != before


def test_arguments_that_sglang_lists(args, made, listed):
    before = made()
    args.an_argument_of_tomorrow = "another"
    assert made() != before
    assert "an_argument_of_tomorrow" in fingerprint._fields() and "download_dir" not in fingerprint._fields()


@pytest.mark.parametrize("field", sorted(fingerprint._NEITHER - {"model_path", "revision"}))
def test_arguments_that_do_not_decide(args, made, field):
    before = made()
    setattr(args, field, "another")
    assert made() == before


@pytest.mark.parametrize("show", fingerprint._RESOLVED)
def test_resolved_arguments(args, made, monkeypatch, show):
    """Two engines may be told "auto" and do different things."""
    args.kv_cache_dtype = "auto"
    before, became = made(), types.SimpleNamespace(kv_cache_dtype="fp8_e4m3")
    monkeypatch.setattr(sys.modules[fingerprint._SHOW_ARGS[0][0]], show, lambda: became, raising=False)
    fp8 = made()
    became.kv_cache_dtype = "auto"
    assert fp8 != before == made()


@pytest.mark.parametrize("field", ["quantization_param_path", "decrypted_config_file", "rl_quant_profile"])
def test_a_file_that_is_written_again(args, made, here, field):
    setattr(args, field, str(here / "scales.json"))
    absent = made()
    (here / "scales.json").write_text("1.0")
    first = made()
    (here / "scales.json").write_text("2.00")
    assert len({absent, first, made()}) == 3
    (here / "scales.json").write_text("1.0")
    assert made() == first


def test_a_folder_that_is_written_again(args, made, here):
    args.modelopt_checkpoint_restore_path = str(here / "restored")
    (here / "restored").mkdir()
    (here / "restored" / "state").write_text("1.0")
    first = made()
    (here / "restored" / "state").write_text("2.00")
    assert made() != first


def test_code_beside_the_weights(args, made, here):
    code = rig.model(here) / "modeling.py"
    code.write_text("one")
    before = made()
    code.write_text("another")
    assert made() == before, "it is not run"
    args.trust_remote_code = True
    trusted = made()
    code.write_text("one")
    assert made() != trusted


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "pt"])
def test_weights_beside_safetensors(args, made, here, load_format):
    """SGLang loads safetensors where there are any, except with a format that names other files."""
    args.load_format = load_format
    (rig.model(here) / "consolidated.pt").write_bytes(b"one")
    before = made()
    (rig.model(here) / "consolidated.pt").write_bytes(b"trained more")
    assert (made() == before) == (load_format != "pt")


@pytest.mark.parametrize("load_format", ["npcache", "presharded", "expert_pack", "of_tomorrow"])
def test_weights_that_are_copies(args, made, load_format):
    """Those formats have files of their own, which SGLang does not write again when those of the model are."""
    args.load_format = load_format
    assert made() != made()


@pytest.mark.parametrize(("field", "value"), [("load_format", "remote_instance"), ("weight_cache_mode", "client")])
def test_weights_of_another_process(args, made, field, value):
    """It may have changed them since it read the files that are here."""
    setattr(args, field, value)
    assert made() != made()


def test_weights_that_are_deleted(args, made):
    args.delete_ckpt_after_loading = True
    assert made() == made(), "they are still there"
    args.model_path = "/no/such/model"
    assert made() != made()
    args.delete_ckpt_after_loading = False
    assert made() == made(), "the path stands for them"


def adapter(folder, name, weights):
    """Write an adapter's files; give their folder."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text("{}")
    return str(path)


def test_adapters(args, made, here):
    without = made()
    a, b = adapter(here, "a", b"one"), adapter(here, "b", b"two")
    args.lora_paths = []
    assert made() == without
    args.lora_paths = [f"a={a}", f"b={b}"]
    both = made()
    for same in (
        {"b": b, "a": a},
        [{"lora_name": "a", "lora_path": a}, {"lora_name": "b", "lora_path": b}],
        [types.SimpleNamespace(lora_id="x", lora_name=n, lora_path=p) for n, p in (("b", b), ("a", a))],
    ):
        args.lora_paths = same
        assert made() == both, same
    adapter(here, "a", b"two")
    adapter(here, "b", b"one")
    swapped = made()
    args.lora_paths = [a, b]
    assert len({without, both, swapped, made()}) == 4
    args.lora_paths = ["a=/no/such/adapter"]
    with pytest.raises(UnsupportedError, match="files of adapter a are not found"):
        made()
    (here / "empty").mkdir()
    args.lora_paths = {"a": str(here / "empty")}
    with pytest.raises(UnsupportedError, match="files of adapter a are not found"):
        made()


def test_an_adapter_that_is_replaced_in_place(engine, args, here):
    args.lora_paths = [f"a={adapter(here, 'a', b'one')}"]
    names = rig.keys(0, 5)
    assert all(engine().set(names, PAGES[:6]))
    assert engine().exists(names) == 6
    adapter(here, "a", b"trained more")
    e = engine()
    assert e.exists(names) == 0 and e.get(names, PAGES[:6]) == [False] * 6
