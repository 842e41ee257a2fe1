"""The configs that the suite runs with: those in the fixture.json beside every plugin that is built.

verify/fixture/fixture.go documents these files.
"""

import json
import socket
import subprocess
import typing

from rig import ROOT, free_port


class Valkey:
    """A real Valkey server on this machine, from `make deps`, that keeps nothing."""

    def __init__(self, rig, folder):
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = [str(ROOT / ".deps" / "valkey" / "valkey-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "",
                   "--dir", str(folder), "--logfile", str(folder / "valkey.log")]
        self.process = subprocess.Popen(command)
        rig.processes.append(self)
        rig.until(lambda: self.process.poll() is not None or listens(port), "the Valkey server")
        rig.check(self.process.poll() is None, "the Valkey server ended")

    def stop(self):
        """End it."""
        self.process.terminate()
        self.process.wait()


def listens(port):
    """Whether something takes connections there."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


class Setup(typing.NamedTuple):
    """One way to set a connector up under vLLM; see Setup and Fixture in verify/fixture."""

    label: str
    connector: str
    config: dict
    peers: bool  # it only moves blocks from a prefill engine to a decode engine
    shared: bool  # another engine finds what one has stored
    lines: tuple  # further lines that run it
    plugin: str  # the name of its binary
    typical: str

    @property
    def folder(self):
        """The name of its folder in a rig's."""
        return self.label.replace(" ", "-").replace("'", "").lower()

    def fill(self, rig, folder):
        """Its config, below a folder. A string that is a placeholder alone could become a number, but none here does; rig.kvport gives roles to children."""
        text = json.dumps(self.config)
        values = {"@TMP@": str(folder), "@NAME@": self.folder, "@ROLE@": "kv_both"}
        if "@SERVER@" in text:
            values["@SERVER@"] = Valkey(rig, folder / "valkey").address
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        return json.loads(text)


def manifests():
    """The names of the plugins in bin, as their manifests say, and their files."""
    names = {}
    for plugin in sorted((ROOT / "bin").glob("kvport-*")):
        done = subprocess.run([str(plugin), "--manifest"], capture_output=True, text=True, check=True, timeout=20)
        names[json.loads(done.stdout)["name"]] = plugin.name
    return names


def fixtures():
    """The fixtures of plugins and examples, by the connector's name."""
    found = {}
    for path in sorted([*ROOT.glob("plugins/*/fixture.json"), *ROOT.glob("examples/*/fixture.json")]):
        fixture = json.loads(path.read_text(encoding="utf-8"))
        found[fixture["connector"]] = fixture
    return found


def setups():
    """What can be set up: the Setups of every plugin that is built, and the names of plugins without a fixture."""
    known, out, unknown = fixtures(), [], []
    for name, plugin in manifests().items():
        if name not in known:
            unknown.append(name)
            continue
        fixture = known[name]
        peers = fixture.get("peers", False)
        for s in fixture.get("vllm") or [{**fixture["setups"][0], "name": name.removesuffix("Connector")}]:
            shared = not peers and s.get("pairs", False) and s.get("keeps", False)
            out.append(Setup(s["name"], name, s["config"], peers, shared, tuple(s.get("lines", ())), plugin, fixture.get("typical", "")))
    return out, unknown


def alone(setup):
    """Those that one engine can use by itself."""
    return not setup.peers


def apart(setup):
    """Those that hand over from a prefill engine to a decode engine."""
    return setup.peers or setup.shared


def handover(setup):
    """The one of lines that need but one connector between a prefill and a decode engine."""
    return setup.typical == "peers"


def line(name):
    """Those whose fixture names a line of run.py."""
    return lambda setup: name in setup.lines


def typical(setup):
    """The one of lines that need but one store of files."""
    return setup.typical == "store"


def storage(rig, folder):
    """The connector of lines that need but one: (label, connector, extra config). Its files are below a folder."""
    setup = next(s for s in setups()[0] if typical(s))
    return setup.label, setup.connector, setup.fill(rig, folder)


def storage_plugin():
    """The name of that connector's binary."""
    return next(s for s in setups()[0] if typical(s)).plugin


def chosen(options, select):
    """The setups that a function selects, of those that were asked for; and the plugins without a fixture."""
    names = [c for c in options.connector.split(",") if c]
    found, unknown = setups()
    return [s for s in found if select(s) and (not names or s.connector in names or s.label in names)], unknown


def configs(rig, select=alone):
    """(setup, extra config) of everything that a function selects; notes what is left out."""
    found, unknown = chosen(rig.options, select)
    rig.notes += [f"{name} has no fixture.json and was left out" for name in unknown]
    return [(s, s.fill(rig, rig.folder / s.folder)) for s in found]
