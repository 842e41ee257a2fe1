"""Installs each wheel in dist/ into a fresh environment, and uses it as somebody does who has only that.

That for SGLang is played what SGLang 0.5.23 called once, over a stand-in of its pool: SGLang is not needed. Run through `make wheel-test`.
"""

import email
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLUGINS = sorted(p.name for p in (ROOT / "plugins").iterdir() if p.is_dir())


def output(*command):
    """What a command prints, on either stream; it must succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{command} exits {done.returncode}:\n{done.stdout}"
    return done.stdout


def check_contents(wheel, packages, extras, entries):
    """A wheel's tag is one that package indexes take, programs are stripped, licences are inside, and of the packages those that belong there."""
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(metadata))
        assert fields["Name"].replace("-", "_") == wheel.name.split("-")[0], fields["Name"]
        assert fields.get_all("Provides-Extra", []) == extras, fields
        for name in ("LICENSE", "go/LICENSE", "github.com/hashicorp/go-plugin/LICENSE"):
            assert metadata.replace("METADATA", f"licenses/{name}") in names, name
        found = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        assert found == packages, found
        text = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        assert text == "[console_scripts]\nkvport = kvport_agent.command:main\n" + entries, text
        for name in ("kvport", *(f"kvport-{p}" for p in PLUGINS)):
            assert b".symtab" not in archive.read(f"kvport_agent/bin/{name}"), f"{name} has a symbol table"


def install(wheel, folder):
    """Make an environment with nothing but a wheel; `kvport` is on its PATH and finds its plugins. Gives its programs' folder and its packages'."""
    venv.create(folder, with_pip=True)
    bin_dir = folder / "bin"
    output(str(bin_dir / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel))
    kvport = str(bin_dir / "kvport")
    version = output(kvport, "--version")
    assert wheel.name.split("-")[1] in version, version
    listed = output(kvport, "plugins", "list")
    for fixture in ROOT.glob("plugins/*/fixture.json"):
        assert json.loads(fixture.read_text())["connector"] in listed, listed
    [packages] = (folder / "lib").glob("python3.*/site-packages")
    return bin_dir, packages


def link(source, packages):
    """Put beside a wheel what pip would install there."""
    for part in source:
        (packages / part.name).symlink_to(part)


def check_vllm(wheel, folder):
    """NIXL is found once it is installed beside the wheel."""
    bin_dir, packages = install(wheel, folder)
    doctor = (str(bin_dir / "kvport"), "doctor")
    before = subprocess.run(doctor, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    assert "pip install nixl-cu12" in before, before
    link((ROOT / ".deps" / "nixl").iterdir(), packages)  # what pip unpacks of NIXL's wheel
    after = subprocess.run(doctor, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    assert "pip install nixl-cu12" not in after, after
    assert "site-packages" in after, after
    return "NIXL found beside it"


# Runs in the environment of the wheel: argument 1 is the folder of the recordings and of the stand-ins, 2 one for files.
PLAY = """
import importlib.metadata, pathlib, sys
sys.path.append(sys.argv[1])
import sglang_fakes
sglang_fakes.install()
import kvport_agent.binary, kvport_sglang, sglang_engine
packages = pathlib.Path(sys.prefix) / "lib"
for path in kvport_sglang.__file__, kvport_agent.binary.find_binary():
    assert packages in pathlib.Path(path).parents, path
[entry] = importlib.metadata.entry_points(group="sglang.srt.plugins")
assert entry.load().__module__ == "kvport_sglang.early", entry
calls = pages = 0
for name in "store", "faults":
    folder = pathlib.Path(sys.argv[2]) / name
    folder.mkdir()
    engine, log = sglang_engine.Engine(folder), sglang_engine.recorded(name)
    player = sglang_engine.Player(engine)
    player.play(log)
    assert engine.backend.faults.counts == {}, engine.backend.faults.counts
    calls, pages = calls + sum("method" in row for row in log), pages + len(player.stored)
    engine.close()
print(f"{calls} recorded calls played, {pages} pages stored")
"""


def check_sglang(wheel, folder):
    """What SGLang called once is answered rightly: by the wheel's packages, agent and plugin, without SGLang."""
    bin_dir, packages = install(wheel, folder)
    [pinned] = (ROOT / ".deps" / "venv" / "lib").glob("python3.*/site-packages")
    link([pinned / "google"], packages)  # of protobuf, on which the wheel depends
    files = folder / "files"
    (files / "run").mkdir(mode=0o700, parents=True)
    env = {k: v for k, v in os.environ.items() if k not in ("KVPORT_BIN", "PYTHONPATH")}
    env.update(XDG_RUNTIME_DIR=str(files / "run"), XDG_CACHE_HOME=str(files / "cache"))
    done = subprocess.run([str(bin_dir / "python"), "-c", PLAY, str(ROOT / "python" / "tests"), str(files)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


WHEELS = {
    "kvport_vllm": (check_vllm, {"kvport_agent", "kvport_vllm"}, ["nixl"], ""),
    "kvport_sglang": (check_sglang, {"kvport_agent", "kvport_sglang"}, [], "[sglang.srt.plugins]\nkvport = kvport_sglang.early:register\n"),
}


def main():
    for name, (check, packages, extras, entries) in WHEELS.items():
        wheels = sorted((ROOT / "dist").glob(f"{name}-*.whl"), key=lambda path: path.stat().st_mtime)
        assert wheels, f"dist/ holds no wheel {name}: run `make wheel`"
        check_contents(wheels[-1], packages, extras, entries)
        with tempfile.TemporaryDirectory() as folder:
            said = check(wheels[-1], pathlib.Path(folder))
        print(f"wheel-test: {wheels[-1].name} installs and works: {len(PLUGINS)} plugins; {said}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as err:
        sys.exit(f"wheel-test: {err}")
