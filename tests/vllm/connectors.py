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


def multi(rig, folder):
    """Three children: a tier of its own that holds a few prompts, shared storage, and a remote store. rig.kvport gives them their roles."""
    children = {"OffloadingConnector": {"cpu_bytes_to_use": 1 << 27}, "SharedStorageConnector": store(folder / "store"),
                "RemoteStoreConnector": {"url": f"unix://{Valkey(rig, folder / 'valkey').socket}"}}
    return {"connectors": [{"kv_connector": name, "kv_connector_extra_config": extra} for name, extra in children.items()]}


def aibrix(rig, folder):
    """AIBrix's two tiers, the second a Valkey server."""
    return {"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "1", "AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND": "REDIS",
            "AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE": "ALL", "AIBRIX_KV_CACHE_OL_CHUNK_SIZE": "32",
            "AIBRIX_KV_CACHE_OL_REDIS_URL": f"unix://{Valkey(rig, folder).socket}"}


def lmcache(rig, folder):
    """LMCache's tiers, the last a Valkey server."""
    return {"lmcache.chunk_size": "32", "lmcache.max_local_cpu_size": "1", "lmcache.remote_url": f"unix://{Valkey(rig, folder).socket}"}


# Plugin by the name in its manifest: {label: what makes its config for a rig and a folder}.
CONFIGS = {
    "SharedStorageConnector": {"SharedStorage": lambda _rig, folder: store(folder / "store")},
    "OffloadingConnector": {
        "Offloading memory": lambda _rig, _folder: {"cpu_bytes_to_use": 1 << 30},
        "Offloading disk": lambda _rig, folder: {"cpu_bytes_to_use": 64 << 20, "disk_path": str(folder / "disk"), "disk_bytes": 2 << 30, "disk_admit_after": 1},
    },
    "MultiConnector": {"Multi": multi},
    "AIBrixOffloadingConnectorV1Type1": {"AIBrix": aibrix},
    "LMCacheConnectorV1": {"LMCache's formats": lmcache},
    "RemoteStoreConnector": {"Remote": lambda rig, folder: {"url": f"unix://{Valkey(rig, folder).socket}"}},
    "MinimalConnector": {"Minimal": lambda _rig, folder: {"dir": str(folder / "minimal")}},
    "PipeConnector": {"Pipe": lambda _rig, _folder: {"listen": "127.0.0.1:0", "buffer_bytes": 1 << 29}},
    "NixlConnector": {"NIXL": lambda _rig, _folder: {}},
    "P2pNcclConnector": {"P2pNccl": lambda _rig, _folder: {"kv_buffer_size": 1 << 29}},
}
# Those that find what another engine has stored.
SHARED = ("SharedStorage", "Multi", "AIBrix", "LMCache's formats", "Remote")
# Those that only move blocks from a prefill engine to a decode engine.
PEERS = ("Pipe", "NIXL", "P2pNccl")
# One of each way to hand over, for the line with routers: through a store, pushed, read in place.
ROUTED = ("SharedStorage", "Pipe", "NIXL")


def manifests():
    """The names of the plugins in bin, as their manifests say."""
    names = []
    for plugin in sorted((ROOT / "bin").glob("kvport-*")):
        done = subprocess.run([str(plugin), "--manifest"], capture_output=True, text=True, check=True, timeout=20)
        names.append(json.loads(done.stdout)["name"])
    return names


def storage(rig):
    """The connector of lines that need but one: (label, connector, extra config)."""
    return "SharedStorage", "SharedStorageConnector", store(rig.folder / "store")


def configs(rig, only=None):
    """(label, connector, extra config) of everything that one engine can use; notes what is left out. With only, those labels."""
    out, chosen = [], [c for c in rig.options.connector.split(",") if c]
    for name in manifests():
        if name not in CONFIGS:
            rig.notes.append(f"{name} has no config in tests/vllm/connectors.py and was left out")
            continue
        for label, make in CONFIGS[name].items():
            if (not chosen or name in chosen or label in chosen) and (label in only if only else label not in PEERS):
                out.append((label, name, make(rig, rig.folder / label.replace(" ", "-").replace("'", "").lower())))
    return out
