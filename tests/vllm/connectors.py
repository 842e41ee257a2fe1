"""The configs that the suite runs with: one or more for each plugin that is built."""

import json
import subprocess

# Plugin by the name in its manifest: {label: config made from a folder}. A plugin without a line here still
# runs, with an empty config if its schema allows that.
CONFIGS = {
    "SharedStorageConnector": {"SharedStorage": lambda dir_: {"shared_storage_path": f"{dir_}/store"}},
    "OffloadingConnector": {
        "Offloading memory": lambda _dir: {"cpu_bytes_to_use": 1 << 30},
        "Offloading disk": lambda dir_: {"cpu_bytes_to_use": 64 << 20, "disk_path": f"{dir_}/disk", "disk_bytes": 2 << 30},
    },
}
# Those that another engine can read from: prefill and decode apart.
SHARED = ("SharedStorage",)


def manifests(root):
    """The names of the plugins that are built."""
    names = {}
    for binary in sorted((root / "bin").glob("kvport-*")):
        done = subprocess.run([str(binary), "--manifest"], capture_output=True, text=True, check=False, timeout=20)
        if done.returncode == 0:
            names[json.loads(done.stdout)["name"]] = binary
    return names


def configs(rig, root):
    """(label, connector, extra config) of everything that can run; notes what is left out."""
    out = []
    for name in manifests(root):
        if name not in CONFIGS:
            rig.notes.append(f"{name} has no config in tests/vllm/connectors.py and was left out")
            continue
        for label, make in CONFIGS[name].items():
            if rig.options.connector in ("", name, label):
                out.append((label, name, make(rig.folder / label.replace(" ", "-").lower())))
    return out
