"""Installs the wheel in dist/ into a fresh environment, and uses it as somebody does who has only that.

Run through `make wheel-test`.
"""

import email
import json
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


def check_contents(wheel):
    """The wheel's tag is one that package indexes take, programs are stripped, licences are inside."""
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(metadata))
        assert "nixl" in fields.get_all("Provides-Extra"), fields
        for name in ("LICENSE", "go/LICENSE", "github.com/hashicorp/go-plugin/LICENSE"):
            assert metadata.replace("METADATA", f"licenses/{name}") in names, name
        for package in ("kvport_agent", "kvport_sglang", "kvport_vllm"):
            assert f"{package}/__init__.py" in names, package
        entries = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        assert "[sglang.srt.plugins]\nkvport = kvport_sglang.early:register\n" in entries, entries
        for name in ("kvport", *(f"kvport-{p}" for p in PLUGINS)):
            assert b".symtab" not in archive.read(f"kvport_agent/bin/{name}"), f"{name} has a symbol table"


def check_installed(wheel, folder):
    """`kvport` is on the PATH of the environment, finds its plugins, and NIXL once that is installed beside it."""
    venv.create(folder, with_pip=True)
    bin_dir = folder / "bin"
    output(str(bin_dir / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel))
    kvport = str(bin_dir / "kvport")
    version = output(kvport, "--version")
    assert wheel.name.split("-")[1] in version, version
    listed = output(kvport, "plugins", "list")
    for fixture in ROOT.glob("plugins/*/fixture.json"):
        assert json.loads(fixture.read_text())["connector"] in listed, listed
    doctor = (kvport, "doctor")
    before = subprocess.run(doctor, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    assert "pip install nixl-cu12" in before, before
    [packages] = (folder / "lib").glob("python3.*/site-packages")
    for part in (ROOT / ".deps" / "nixl").iterdir():  # what pip unpacks of NIXL's wheel
        (packages / part.name).symlink_to(part)
    after = subprocess.run(doctor, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    assert "pip install nixl-cu12" not in after, after
    assert "site-packages" in after, after


def main():
    wheels = sorted((ROOT / "dist").glob("kvport_vllm-*.whl"), key=lambda path: path.stat().st_mtime)
    assert wheels, "dist/ holds no wheel: run `make wheel`"
    check_contents(wheels[-1])
    with tempfile.TemporaryDirectory() as folder:
        check_installed(wheels[-1], pathlib.Path(folder))
    print(f"wheel-test: {wheels[-1].name} installs and works: {len(PLUGINS)} plugins, NIXL found beside it")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as err:
        sys.exit(f"wheel-test: {err}")
