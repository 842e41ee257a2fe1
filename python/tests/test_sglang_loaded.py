"""Files that are written again after SGLang has loaded them: their hashes are not of what this process computes with."""

import os
import pathlib

import pytest
import sglang_engine as rig
import sglang_fakes as fakes

fakes.install()

from kvport_sglang import early, fingerprint, loaded  # noqa: E402

PAGES = list(range(20))
NAMES = rig.keys(0, 5)


@pytest.fixture
def args(here, server_args, monkeypatch):
    """Arguments of a server with a model that is here, an adapter, and a file that decides."""
    monkeypatch.setattr(loaded, "FILES", loaded.Files())
    model = rig.model(here, b"one")
    (model / "config.json").write_text("{}")
    (model / "modeling.py").write_text("one")
    (here / "a").mkdir()
    (here / "a" / "adapter_config.json").write_text("{}")
    (here / "scales.json").write_text("1.0")
    for path in (*model.iterdir(), here / "a" / "adapter_config.json", here / "scales.json"):
        os.utime(path, ns=(1, 1))  # long ago: clocks of file systems are coarse
    return server_args(
        model_path=str(model), trust_remote_code=True, lora_paths=[f"a={here / 'a'}"], quantization_param_path=str(here / "scales.json")
    )


def test_weights_that_are_trained_in_place(engine, args, here, caplog):
    """The engine has KV of the old weights, and its backend is attached again, or late."""
    early.check(None, args)
    first = engine()
    assert all(first.set(NAMES, PAGES[:6])) and engine().exists(NAMES) == 6
    assert "changed on disk" not in caplog.text
    (pathlib.Path(args.model_path) / "model.safetensors").write_bytes(b"two")
    again = engine()
    assert "changed on disk since they were loaded, if only in owner or mode: this engine shares its pages with nobody" in caplog.text
    assert again.exists(NAMES) == 0 and all(again.set(NAMES, PAGES[:6])) and all(again.get(NAMES, PAGES[:6]))
    early.check(None, args)  # an engine that starts from the new files
    assert engine().exists(NAMES) == 0


def write_as_old(path):
    """Write a file so that only its ctime shows that, as tools do that keep times."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


WRITES = {
    "weights": lambda here, model: (model / "model.safetensors").write_bytes(b"two"),
    "more weights": lambda here, model: (model / "model-2.safetensors").write_bytes(b"two"),
    "no weights": lambda here, model: (model / "model.safetensors").unlink(),
    "config": lambda here, model: (model / "config.json").write_text('{"a": 1}'),
    "code": lambda here, model: (model / "modeling.py").write_text("two"),
    "adapter": lambda here, model: (here / "a" / "adapter_config.json").write_text('{"a": 1}'),
    "a file that an argument names": lambda here, model: (here / "scales.json").write_text("2.0"),
    "weights of the same size and time": lambda here, model: write_as_old(model / "model.safetensors"),
    "a link to another model": lambda here, model: (model.rename(here / "old"), model.symlink_to(rig.model(here, b"two"))),
}


@pytest.mark.parametrize("what", WRITES)
def test_each_file(args, here, what):
    early.check(None, args)
    assert not loaded.FILES.changed()
    WRITES[what](here, pathlib.Path(args.model_path))
    assert loaded.FILES.changed()


def test_files_that_do_not_count(args, here):
    early.check(None, args)
    model = pathlib.Path(args.model_path)
    (model / "README.md").write_text("of no use")
    (model / "optimizer.pt").write_bytes(b"passed over where there are safetensors")
    assert not loaded.FILES.changed()
    args.load_format = "pt"
    early.check(None, args)
    assert not loaded.FILES.changed()
    (model / "optimizer.pt").write_bytes(b"loaded")
    assert loaded.FILES.changed()


def test_a_model_of_a_hub(args, here, monkeypatch):
    """SGLang fetches it while it starts; later its name may mean another commit."""
    args.model_path, there = "org/model", {}
    plain = fingerprint.local_folder
    monkeypatch.setattr(fingerprint, "local_folder", lambda name, revision: there.get(name) or plain(name, revision))
    early.check(None, args)
    assert not loaded.FILES.changed()
    there["org/model"] = rig.model(here, b"of a commit")
    assert not loaded.FILES.changed(), "it has been fetched to be loaded"
    early.made(None)
    assert not loaded.FILES.changed()
    there["org/model"] = rig.model(here, b"of the next commit")
    assert loaded.FILES.changed()


def test_files_that_cannot_be_seen(args, monkeypatch):
    """An engine without kvport starts all the same; a backend that is attached later shares nothing."""
    args.lora_paths = 3
    assert not loaded.FILES.changed(), "nobody has shown them: a warning of the backend says so"
    early.check(None, args)
    early.made(None)
    assert loaded.FILES.changed()
