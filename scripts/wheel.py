"""Writes dist/kvport_vllm-*.whl: the Python package, the kvport binary and every plugin, for this platform.

Run through `make wheel`, which builds bin/ first. Only the standard library is used: a wheel is a zip
file with three more files in it, and no build backend would put our binaries there.
"""

import base64
import hashlib
import pathlib
import platform
import sys
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "python"
PACKAGE = "kvport_vllm"
EPOCH = (2026, 1, 1, 0, 0, 0)  # the same input gives the same wheel
EXECUTABLE, PLAIN = 0o100755, 0o100644


class WheelError(Exception):
    """A failure that the user can do something about; its text says what."""


def members(project):
    """List what the wheel holds: name inside, file, mode."""
    package = SOURCE / PACKAGE
    for path in sorted(package.rglob("*")):
        if path.is_file() and (path.suffix == ".py" or path.name == "py.typed"):
            yield path.relative_to(SOURCE).as_posix(), path, PLAIN
    descriptors = (SOURCE / project["tool"]["kvport"]["descriptors"]).resolve()
    yield f"{PACKAGE}/{descriptors.name}", descriptors, PLAIN
    binaries = [ROOT / "bin" / "kvport"]
    binaries += sorted(ROOT / "bin" / f"kvport-{p.name}" for p in (ROOT / "plugins").iterdir() if p.is_dir())
    for path in binaries:
        if not path.exists():
            raise WheelError(f"{path.relative_to(ROOT)} is not there: run `make build`")
        yield f"{PACKAGE}/bin/{path.name}", path, EXECUTABLE


def metadata(project):
    """Make METADATA of pyproject.toml."""
    p = project["project"]
    lines = ["Metadata-Version: 2.1", f"Name: {p['name']}", f"Version: {p['version']}", f"Summary: {p['description']}",
             f"License: {p['license']}", f"Requires-Python: {p['requires-python']}"]
    lines += [f"Requires-Dist: {d}" for d in p["dependencies"]]
    lines += ["Description-Content-Type: text/markdown", "", (SOURCE / p["readme"]).read_text(encoding="utf-8")]
    return "\n".join(lines)


def record_line(name, data):
    """Make a line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def build(out):
    """Write the wheel and give its path."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    tag = f"py3-none-linux_{platform.machine()}"
    info = f"{PACKAGE}-{version}.dist-info"
    out.mkdir(exist_ok=True)
    target = out / f"{PACKAGE}-{version}-{tag}.whl"
    record = ""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        def add(name, data, mode):
            nonlocal record
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
            record += record_line(name, data)

        for name, path, mode in members(project):
            add(name, path.read_bytes(), mode)
        add(f"{info}/METADATA", metadata(project).encode(), PLAIN)
        add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: kvport\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), PLAIN)
        entry = zipfile.ZipInfo(f"{info}/RECORD", EPOCH)
        entry.external_attr = PLAIN << 16
        wheel.writestr(entry, record + f"{info}/RECORD,,\n")
    return target


if __name__ == "__main__":
    try:
        path = build(ROOT / "dist")
    except (WheelError, OSError) as err:
        sys.exit(f"wheel: {err}")
    print(f"wheel: wrote {path.relative_to(ROOT)} ({path.stat().st_size >> 20} MiB)")
