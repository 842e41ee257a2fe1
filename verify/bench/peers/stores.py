"""Other people's stores of KV cache, for kvport bench store: python stores.py NAME FOLDER.

Answers commands on standard input with numbers on standard output:

open SEGMENTS BYTES BLOCKS BATCH   starts the store NAME for a cache of BLOCKS blocks; 0
store                              seconds to store the next BATCH blocks, under new keys
load                               seconds to load BATCH of the blocks stored last, each time others

What cannot be answered is answered with "absent REASON". Loaded bytes are compared with what was stored,
outside the time that is told. FOLDER is one that the store may write to.
"""

import atexit
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

try:
    import numpy
except ImportError as err:
    numpy, missing = None, err

NAME, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])


def free_port():
    """A port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, port, environment=None):
    """Start a server that dies with us, and wait until it listens."""

    def die_with_parent():
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    log = FOLDER / f"{NAME}.log"
    with log.open("ab") as out:
        server = subprocess.Popen([str(c) for c in command], stdout=out, stderr=out, env={**os.environ, **(environment or {})}, cwd=FOLDER,
                                  preexec_fn=die_with_parent)
    atexit.register(server.kill)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"{command[0]} ended with {server.returncode}: {log.read_text(errors='replace')[-300:]}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{command[0]} does not listen after 90 s")


class Walk:
    """A cache of blocks, each in segments as an engine keeps them, and the order in which steps use it."""

    def __init__(self, segments, size, blocks, batch):
        self.segments, self.size, self.blocks, self.batch = segments, size, blocks, batch
        self.cache = numpy.random.default_rng(1).integers(0, 256, (segments, blocks, size), dtype=numpy.uint8)
        self.steps = blocks // batch
        self.stored = self.loaded = 0

    def at(self, step):
        """The blocks of a step."""
        first = step % self.steps * self.batch
        return range(first, first + self.batch)

    def parts(self, step):
        """The memory of a step's blocks."""
        at = self.at(step)
        return [self.cache[:, at.start:at.stop]]

    def store(self):
        """Store the next step."""
        step, self.stored = self.stored, self.stored + 1
        self.before_store(step)
        for _ in range(5):
            begin = time.perf_counter()
            self.put(step)
            took = time.perf_counter() - begin
            if self.kept(step):
                return took
        raise RuntimeError("does not store: five times it said so and had nothing")

    def load(self):
        """Load a step that was stored, not one of the last."""
        self.loaded += 1
        step = self.stored - self.steps + self.loaded * 7 % (self.steps // 2)
        self.want = [part.copy() for part in self.parts(step)]
        for part in self.parts(step):
            part[:] = 0
        self.before_load(step)
        begin = time.perf_counter()
        self.get(step)
        took = time.perf_counter() - begin
        if not all(map(numpy.array_equal, self.parts(step), self.want)):
            raise RuntimeError("loaded other bytes than were stored")
        return took

    def kept(self, _step):
        """Whether what was stored is there: a store that drops blocks is quick."""
        return True

    def restore(self, step):
        """Store again what a store has lost."""
        for part, want in zip(self.parts(step), self.want, strict=True):
            part[:] = want
        self.put(step)
        for part in self.parts(step):
            part[:] = 0

    def before_store(self, step):
        """What a store needs and does not count."""

    def before_load(self, step):
        """What a load needs and does not count."""


class Safetensors(Walk):
    """A file for each block, with a tensor for each layer."""

    def __init__(self, *shape):
        super().__init__(*shape)
        from safetensors.numpy import load_file, save_file

        self.save_file, self.load_file = save_file, load_file

    def name(self, step, block):
        return str(FOLDER / f"{step}-{block}")

    def put(self, step):
        for block in self.at(step):
            name = self.name(step, block)
            self.save_file({str(i): self.cache[i, block] for i in range(self.segments)}, name + ".tmp")
            os.rename(name + ".tmp", name)

    def get(self, step):
        for block in self.at(step):
            for i, tensor in self.load_file(self.name(step, block)).items():
                self.cache[int(i), block] = tensor


class Redis(Walk):
    """redis-py with hiredis: SET and GET of whole blocks, with a copy to make one of the segments."""

    def __init__(self, *shape):
        super().__init__(*shape)
        import redis

        host, port = os.environ["KVPORT_BENCH_REDIS"].rsplit(":", 1)
        self.client = redis.Redis(host, int(port))
        self.client.ping()

    def name(self, step, block):
        return f"peer:{step % (2 * self.steps)}:{block}"

    def names(self, step):
        return [self.name(step, block) for block in self.at(step)]

    def put(self, step):
        pipeline = self.client.pipeline(transaction=False)
        for block in self.at(step):
            pipeline.set(self.name(step, block), self.cache[:, block].tobytes())
        pipeline.execute()

    def before_load(self, step):
        if self.client.exists(*self.names(step)) < self.batch:  # evicted: ours are in the same server
            self.restore(step)

    def get(self, step):
        for block, value in zip(self.at(step), self.client.mget(self.names(step)), strict=True):
            self.cache[:, block] = numpy.frombuffer(value, dtype=numpy.uint8).reshape(self.segments, self.size)


class Mooncake(Walk):
    """Mooncake's thin client: its store is in another process, blocks go through a pool that both see."""

    def __init__(self, *shape):
        super().__init__(*shape)
        import mooncake
        from mooncake.store import MooncakeDistributedStore

        binaries = pathlib.Path(mooncake.__file__).parent
        for binary in ("mooncake_master", "mooncake_client"):
            os.chmod(binaries / binary, 0o755)
        master, client, metrics = free_port(), free_port(), free_port()
        bytes_ = self.segments * self.size
        held = 4 * self.blocks * bytes_ + (64 << 20)
        start([binaries / "mooncake_master", "-rpc_port", master, "-metrics_port", metrics, "-default_kv_lease_ttl", 5000], master)
        start([binaries / "mooncake_client", "-host", "127.0.0.1", "-port", client, "-metadata_server", "P2PHANDSHAKE", "-protocol", "tcp",
               "-master_server_address", f"127.0.0.1:{master}", "-global_segment_size", f"{held >> 20} MB"], client)
        self.store_ = MooncakeDistributedStore()
        pool = 4 * self.batch * bytes_ + (16 << 20)
        self.check("setup_dummy", self.store_.setup_dummy(pool, pool, f"127.0.0.1:{client}"))
        at = self.store_.alloc_from_mem_pool(self.batch * bytes_)
        if not at:
            raise RuntimeError("alloc_from_mem_pool gave nothing")
        self.check("register_buffer", self.store_.register_buffer(at, self.batch * bytes_))
        self.places = [at + i * bytes_ for i in range(self.batch)]
        self.pool = numpy.ctypeslib.as_array((ctypes.c_uint8 * (self.batch * bytes_)).from_address(at)).reshape(
            self.batch, self.segments, self.size)
        self.sizes = [bytes_] * self.batch

    @staticmethod
    def check(what, *codes):
        if any(c < 0 for c in codes):
            raise RuntimeError(f"{what}: {codes}")

    def keys(self, step):
        return [f"{step}-{block}" for block in self.at(step)]

    def before_store(self, step):
        if step >= 2 * self.steps:
            for key in self.keys(step - 2 * self.steps):
                self.store_.remove(key, True)

    def put(self, step):
        for i, block in enumerate(self.at(step)):
            self.pool[i] = self.cache[:, block]
        self.check("put", *self.store_.batch_put_from(self.keys(step), self.places, self.sizes))

    def get(self, step):
        self.check("get", *self.store_.batch_get_into(self.keys(step), self.places, self.sizes))
        for i, block in enumerate(self.at(step)):
            self.cache[:, block] = self.pool[i]


class LMCache(Walk):
    """LMCache's daemon, driven by the client of its own `lmcache bench server --mode cpu`."""

    tokens, engine_block = 64, 16

    def __init__(self, *shape):
        super().__init__(*shape)
        from lmcache.cli.commands.bench.server_bench import client, config

        port, http = free_port(), free_port()
        held = 8 * self.blocks * self.segments * self.size
        start([sys.executable, "-m", "lmcache.cli.main", "server", "--port", port, "--http-port", http, "--chunk-size", self.tokens,
               "--l1-size-gb", held / (1 << 30), "--eviction-policy", "LRU", "--no-l1-use-lazy", "--supported-transfer-mode", "lmcache_driven", "--disable-observability"],
              http, {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"})
        # Two times head size 64 times 2 bytes times the heads that make a segment of 64 tokens.
        heads = self.size // (2 * 64 * 2 * self.tokens)
        if heads * 2 * 64 * 2 * self.tokens != self.size:
            raise RuntimeError(f"no model has segments of {self.size} bytes")
        pages = self.blocks * self.tokens // self.engine_block + 1  # its page 0 stands for no data
        self.client = client.ServerBenchClient(config.BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{port}", http_url=f"http://127.0.0.1:{http}", mode="cpu", transfer_mode="lmcache_driven", tp_size=1,
            use_mla=False, num_tokens=self.batch * self.tokens, num_blocks=pages, block_size=self.engine_block,
            kvcache_shape_spec=f"(2,{pages},{self.engine_block},{heads},64):bfloat16:{self.segments}"), lambda text: None)
        self.client.start()
        self.requests = {}
        import torch

        # Its cache is in shared memory of its own, and takes the place of ours.
        self.layers = [t.view(torch.uint8).numpy() for t in self.client._workers[0].kv_caches.values()]
        for layer in self.layers:
            layer[:] = numpy.random.default_rng(1).integers(0, 256, layer.shape, dtype=numpy.uint8)

    def parts(self, step):
        r = self.requests[step]
        return [layer[half, r.block_offset:r.block_offset + r.num_blocks] for layer in self.layers for half in range(2)]

    def before_store(self, step):
        old = self.requests.pop(step - 2 * self.steps, None)
        if old is not None:
            self.client.end_session(old)
        self.requests[step] = self.client.create_request(step, f"r{step}", "bench")

    def put(self, step):
        r = self.requests[step]
        if not self.client.store(r, 0, r.num_full_tokens).succeeded:
            raise RuntimeError("STORE failed")

    def kept(self, step):
        found = False
        for _ in range(50):
            found = self.client.lookup(self.requests[step]).is_full_hit
            if found:
                break
            time.sleep(0.01)
        self.client.end_session(self.requests[step])  # its lookups keep blocks from being evicted
        self.requests[step] = self.client.create_request(step, f"r{step}-{time.monotonic_ns()}", "bench")
        return found

    def before_load(self, step):
        r = self.requests[step]
        for n in range(100):  # a STORE is acknowledged before it is visible, and may be dropped
            if self.client.lookup(r).is_full_hit:
                return
            if n % 20 == 19:
                self.restore(step)
            time.sleep(0.05)
        raise RuntimeError("stored blocks are not found after 5 s, though stored again every second")

    def get(self, step):
        r = self.requests[step]
        if not self.client.retrieve(r, 0, r.num_full_tokens).succeeded:
            raise RuntimeError("RETRIEVE failed")


STORES = {"safetensors": Safetensors, "redis": Redis, "mooncake": Mooncake, "lmcache": LMCache}


def main():
    """Answer commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")  # libraries may print: theirs goes to standard error
    os.dup2(2, 1)
    walk = None
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            if numpy is None:
                raise missing
            if command == "open":
                walk, answer = STORES[NAME](*map(int, arguments)), 0
            else:
                answer = {"store": walk.store, "load": walk.load}[command]()
        except Exception as e:  # a peer that fails is no reason to lose the other rows
            answer = f"absent {type(e).__name__}: {e}"
        print(str(answer).replace("\n", " "), file=answers, flush=True)


main()
