"""Writes dist/kvport_vllm-*.whl and dist/kvport_sglang-*.whl: Python packages, kvport and every plugin, stripped, for this platform.

Run through `make wheel`. Only the standard library is used: a wheel is a zip file with a few more files in it,
and no build backend would put our binaries there. The wheel's tag names the oldest glibc that the binaries can
run with, and the licences of everything that is compiled into them are inside.
"""

import base64
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "python"
HOME = "kvport_agent"  # of the programs, and of what all packages need
EPOCH = (2026, 1, 1, 0, 0, 0)  # the same input gives the same wheel
EXECUTABLE, PLAIN = 0o100755, 0o100644


class WheelError(Exception):
    """A failure that the user can do something about; its text says what."""


def go(*arguments):
    """Run the go command in the repository and return what it prints."""
    return subprocess.run([os.environ.get("GO", "go"), *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def programs():
    """List the packages of the programs in the wheel."""
    return ["./cmd/kvport", *(f"./plugins/{p.name}" for p in sorted((ROOT / "plugins").iterdir()) if p.is_dir())]


def build_programs(version, out):
    """Build every program without symbol tables, which are half of it."""
    out.mkdir(parents=True, exist_ok=True)
    built = []
    for package in programs():
        name = package.rsplit("/", 1)[1]
        path = out / ("kvport" if package == "./cmd/kvport" else f"kvport-{name}")
        print(f"wheel: building {path.name}", flush=True)
        go("build", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w -X main.version={version}", "-o", str(path), package)
        built.append(path)
    return built


def glibc(paths):
    """Find the oldest glibc 2 that has every symbol version which the programs name."""
    needed = [int(minor) for path in paths for minor in re.findall(rb"\bGLIBC_2\.(\d+)", path.read_bytes())]
    return max(needed, default=17)


def licences():
    """List our licence and those of the modules, and of Go itself, that are compiled into the programs."""
    yield "licenses/LICENSE", ROOT / "LICENSE"
    yield "licenses/go/LICENSE", pathlib.Path(go("env", "GOROOT").strip()) / "LICENSE"
    listed = go("list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}{{end}}{{end}}", *programs())
    for line in sorted(set(filter(None, listed.splitlines()))):
        module, folder = line.split("\t")
        found = [path for path in sorted(pathlib.Path(folder).iterdir()) if re.match(r"(?i)(licen[cs]e|copying|notice|patents)", path.name)]
        if not found:
            raise WheelError(f"{module} has no licence file; the wheel must not hold it")
        for path in found:
            yield f"licenses/{module}/{path.name}", path


def read_project():
    """Read pyproject.toml: the file with the descriptors, and one project for each wheel."""
    text = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))
    ours = text["tool"]["kvport"]
    return (SOURCE / ours["descriptors"]).resolve(), [{**text["project"], "name": name, **more} for name, more in ours["wheels"].items()]


def members(project, descriptors, built):
    """List what a wheel holds: name inside, file, mode."""
    for path in sorted(path for package in project["packages"] for path in (SOURCE / package).rglob("*")):
        if path.is_file() and (path.suffix == ".py" or path.name == "py.typed"):
            yield path.relative_to(SOURCE).as_posix(), path, PLAIN
    yield f"{HOME}/{descriptors.name}", descriptors, PLAIN
    for path in built:
        yield f"{HOME}/bin/{path.name}", path, EXECUTABLE


def metadata(p):
    """Make a project's METADATA."""
    lines = ["Metadata-Version: 2.1", f"Name: {p['name']}", f"Version: {p['version']}", f"Summary: {p['description']}",
             f"License: {p['license']}", "License-File: LICENSE", f"Requires-Python: {p['requires-python']}"]
    lines += [f"Requires-Dist: {d}" for d in p["dependencies"]]
    for extra, needed in p.get("optional-dependencies", {}).items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {d}; extra == "{extra}"' for d in needed)]
    lines += ["Description-Content-Type: text/markdown", "", (SOURCE / p["readme"]).read_text(encoding="utf-8")]
    return "\n".join(lines)


def entry_points(project):
    """Make entry_points.txt: the commands that pip puts on the PATH, and what other programs find."""
    groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
    return "".join(f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in entries.items()) for group, entries in groups.items())


def record_line(name, data):
    """Make a line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def write(project, descriptors, built, legal, out):
    """Write one wheel and give its path."""
    name, version = project["name"].replace("-", "_"), project["version"]
    tag = f"py3-none-manylinux_2_{glibc(built)}_{platform.machine()}"
    info = f"{name}-{version}.dist-info"
    target = out / f"{name}-{version}-{tag}.whl"
    record = ""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        def add(name, data, mode):
            nonlocal record
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
            record += record_line(name, data)

        for name, path, mode in members(project, descriptors, built):
            add(name, path.read_bytes(), mode)
        for name, path in legal:
            add(f"{info}/{name}", path.read_bytes(), PLAIN)
        add(f"{info}/entry_points.txt", entry_points(project).encode(), PLAIN)
        add(f"{info}/METADATA", metadata(project).encode(), PLAIN)
        add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: kvport\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), PLAIN)
        entry = zipfile.ZipInfo(f"{info}/RECORD", EPOCH)
        entry.external_attr = PLAIN << 16
        wheel.writestr(entry, record + f"{info}/RECORD,,\n")
    return target


def build(out):
    """Build the programs, write the wheels and give their paths."""
    descriptors, projects = read_project()
    version = projects[0]["version"]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    built, legal = build_programs(f"{version}+{commit}" if commit else version, out / "bin"), list(licences())
    return [write(project, descriptors, built, legal, out) for project in projects]


if __name__ == "__main__":
    try:
        paths = build(ROOT / "dist")
    except (WheelError, OSError, subprocess.CalledProcessError) as err:
        sys.exit(f"wheel: {err}")
    for path in paths:
        print(f"wheel: wrote {path.relative_to(ROOT)} ({path.stat().st_size >> 20} MiB)")
