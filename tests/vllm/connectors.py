"""The configs that the suite runs with: one or more for each plugin that is built."""

import json
import subprocess

from rig import ROOT


class Valkey:
    """A real Valkey server on a socket in a folder, from `make deps`."""

    def __init__(self, rig, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "valkey.sock"
        command = [str(ROOT / ".deps" / "valkey" / "valkey-server"), "--port", "0", "--unixsocket", str(self.socket), "--save", "",
                   "--dir", str(folder), "--logfile", str(folder / "valkey.log")]
        self.process = subprocess.Popen(command)
        rig.processes.append(self)
        rig.until(self.socket.exists, "the Valkey server")

    def stop(self):
        """End it."""
        self.process.terminate()
        self.process.wait()


def store(folder):
    """Shared storage in a folder."""
    return {"shared_storage_path": str(folder)}


def multi(_rig, folder):
    """Two children: a store of its own and shared storage."""
    child = {"kv_role": "kv_both"}
    return {"connectors": [{**child, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28}},
                           {**child, "kv_connector": "SharedStorageConnector", "kv_connector_extra_config": store(folder / "store")}]}


# Plugin by the name in its manifest: {label: what makes its config for a rig and a folder}.
CONFIGS = {
    "SharedStorageConnector": {"SharedStorage": lambda _rig, folder: store(folder / "store")},
    "OffloadingConnector": {
        "Offloading memory": lambda _rig, _folder: {"cpu_bytes_to_use": 1 << 30},
        "Offloading disk": lambda _rig, folder: {"cpu_bytes_to_use": 64 << 20, "disk_path": str(folder / "disk"), "disk_bytes": 2 << 30},
    },
    "MultiConnector": {"Multi": multi},
    "AIBrixOffloadingConnectorV1Type1": {"AIBrix": lambda _rig, _folder: {"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "1"}},
    "LMCacheConnectorV1": {"LMCache's formats": lambda _rig, _folder: {"lmcache.chunk_size": "32", "lmcache.max_local_cpu_size": "1"}},
    "RemoteStoreConnector": {"Remote": lambda rig, folder: {"url": f"unix://{Valkey(rig, folder).socket}"}},
}
# Those that another engine can read from: prefill and decode apart.
SHARED = ("SharedStorage", "Multi", "Remote")


def manifests():
    """The names of the plugins of this repository."""
    names = []
    for folder in sorted((ROOT / "plugins").iterdir()):
        done = subprocess.run([str(ROOT / "bin" / f"kvport-{folder.name}"), "--manifest"], capture_output=True, text=True, check=True, timeout=20)
        names.append(json.loads(done.stdout)["name"])
    return names


def storage(rig):
    """The connector of lines that need but one: (label, connector, extra config)."""
    return "SharedStorage", "SharedStorageConnector", store(rig.folder / "store")


def configs(rig, only=None):
    """(label, connector, extra config) of everything that can run; notes what is left out. With only, those labels."""
    out = []
    for name in manifests():
        if name not in CONFIGS:
            rig.notes.append(f"{name} has no config in tests/vllm/connectors.py and was left out")
            continue
        for label, make in CONFIGS[name].items():
            if rig.options.connector in ("", name, label) and (only is None or label in only):
                out.append((label, name, make(rig, rig.folder / label.replace(" ", "-").replace("'", "").lower())))
    return out
