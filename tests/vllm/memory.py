"""The line about copies: the plugin works on the memory in which vLLM keeps its blocks."""

import mmap
import os
import pathlib

from rig import Engine, kvport

from connectors import storage, storage_plugin


def mapping(pid, address):
    """The inode that backs an address of a process, and where in it the address lies."""
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        begin, end = (int(x, 16) for x in fields[0].split("-"))
        if begin <= address < end:
            return int(fields[4]), address - begin + int(fields[2], 16), fields[5] if len(fields) > 5 else ""
    return 0, 0, ""


def descriptor(pid, inode):
    """A descriptor of a process for an inode, as a path that others may open."""
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.stat(path).st_ino == inode and "memfd" in os.readlink(path):
                return path
        except OSError:
            continue
    return None


def shared(rig):
    """Engine, plugin and this process map one memory; what the plugin loads is where vLLM computes."""
    _, name, extra = storage(rig, rig.folder / "blocks")
    ids = rig.prompts.cut("zero copy", 700)
    want = rig.options.baseline([ids], 8)
    engine = Engine(rig, "engine", kv=kvport(name, extra))
    rig.equal("cold", want, [engine.run(ids, 8)])
    caches = engine.ask("memory")
    pid = engine.process.pid
    inode, start, kind = mapping(pid, caches["base"])
    rig.check(inode > 0 and "memfd" in kind, f"vLLM's cache is in {kind or 'private memory'}, not in a memfd")
    rig.show("vLLM's cache", f"{caches['bytes']:,} bytes in {kind}, inode {inode}")
    plugins = [p for p in engine.kin() if storage_plugin() in engine.kin()[p]]
    rig.check(len(plugins) == 1, f"one plugin process expected: {engine.kin()}")
    inodes = {line.split()[4] for line in pathlib.Path(f"/proc/{plugins[0]}/maps").read_text(encoding="utf-8").splitlines()}
    rig.check(str(inode) in inodes, "the plugin does not map vLLM's cache")
    rig.count("processes that map it", 2)

    engine.reset()
    rig.equal("warm", want, [engine.run(ids, 8)])
    rig.check(engine.external() >= 640, f"only {engine.external()} tokens came from the connector")
    with open(descriptor(pid, inode), "r+b") as f, mmap.mmap(f.fileno(), 0) as seen:
        rig.count("processes that map it")
        found = blocks = 0
        files = [p for p in (rig.folder / "blocks").rglob("*") if p.is_file() and p.stat().st_size > caches["segment"]]
        for path in files:
            data = path.read_bytes()
            middle = data[len(data) // 2:len(data) // 2 + 4096]  # of some layer's segment
            blocks += 1
            at = seen.find(middle, start, start + caches["bytes"])
            found += at >= 0
        rig.check(blocks >= 20 and found >= blocks - 1, f"{found} of {blocks} stored blocks are in vLLM's memory")
        rig.count("stored blocks seen in place by the third process", found)
        # A write by this third process is what vLLM reads.
        sample = seen[start:start + 64]
        rig.check(engine.ask("peek", n=64) == sample.hex(), "vLLM reads other bytes than the third process")
        rig.count("bytes read through vLLM's tensor equal to the mapping", 64)
    engine.stop()
