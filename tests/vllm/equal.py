"""Lines about equal tokens: every connector, both forms of vLLM, prefill and decode apart."""

import functools
import http.server
import json
import socketserver
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from prompts import LENGTHS
from rig import ROOT, Engine, Server, free_port, kvport, serve

from connectors import apart, configs, line, storage

TOKENS = 32
# Where tokens from the connector are counted, nothing is given up because a machine is busy.
UNHURRIED = {"deadlines": {"later": "30s", "transfer": "30s"}}


def full(prompts, block=32):
    """Tokens that a connector can bring: whole blocks, never the last token."""
    return sum((len(p) - 1) // block * block for p in prompts)


def slug(label):
    """A label as part of a file's name."""
    return label.replace(" ", "-").replace("'", "")


class Texts:
    """12 prompts and their second turn, with the tokens that vLLM alone answers."""

    def __init__(self, rig, name="equal"):
        self.rig, self.name = rig, name
        self.first = rig.prompts.set(name, LENGTHS[:rig.options.prompts])
        self.want = rig.options.baseline(self.first, TOKENS)

    @functools.cached_property
    def second(self):
        """The prompts of the second turn: the first, its answer, something more."""
        more = self.rig.prompts.set(self.name + " more", [40] * len(self.first))
        return [p + list(w.ids) + m for p, w, m in zip(self.first, self.want, more)]

    @functools.cached_property
    def want2(self):
        """What vLLM alone answers to it."""
        return self.rig.options.baseline(self.second, TOKENS)


def three_ways(rig, engine, texts, label):
    """Cold, warm and second turn on one engine."""
    rig.equal(f"{label} cold", texts.want, engine.all(texts.first, TOKENS))
    engine.reset()
    before = engine.external()
    rig.equal(f"{label} warm", texts.want, engine.all(texts.first, TOKENS))
    got, most = engine.external() - before, full(texts.first)
    rig.check(got >= 0.9 * most, f"{label} warm: {got} tokens came from the connector, want nearly {most}")
    rig.count("external tokens", got)
    engine.reset()
    before = engine.external()
    rig.equal(f"{label} second turn", texts.want2, engine.all(texts.second, TOKENS))
    got = engine.external() - before
    rig.check(got >= 0.9 * full(texts.first), f"{label} second turn: {got} tokens came from the connector")
    rig.count("external tokens", got)


def connectors(rig):
    """Each connector on one engine, then on another process that finds what the first left."""
    texts = Texts(rig)
    for setup, extra in configs(rig):
        label, name = setup.label, setup.connector
        engine = Engine(rig, slug(label), kv=kvport(name, extra, kvport=UNHURRIED))
        three_ways(rig, engine, texts, label)
        engine.settle(rig.prompts.cut("nudge", 20))
        engine.stop()
        if setup.shared:
            engine = Engine(rig, slug(label) + "-later", kv=kvport(name, extra, role="kv_consumer", kvport=UNHURRIED))
            before = engine.external()
            rig.equal(f"{label} in a later process", texts.want, engine.all(texts.first, TOKENS))
            rig.check(engine.external() - before >= 0.9 * full(texts.first), f"{label}: a later process found little")
            rig.count("external tokens", engine.external() - before)
            engine.stop()
        rig.count("connectors")
        rig.say(f"{label} done")


def together(rig):
    """Four requests at a time, twice, so that loads and saves overlap."""
    texts = Texts(rig)
    for setup, extra in configs(rig):
        label, name = setup.label, setup.connector
        engine = Engine(rig, "batch-" + slug(label), kv=kvport(name, extra, kvport=UNHURRIED))
        rig.equal(f"{label} cold, 4 together", texts.want, engine.all(texts.first, TOKENS, together=4))
        engine.reset()
        rig.equal(f"{label} warm, 4 together", texts.want, engine.all(texts.first, TOKENS, together=4))
        rig.check(engine.external() > 0.5 * full(texts.first), f"{label}: only {engine.external()} tokens came from the connector")
        rig.count("external tokens", engine.external())
        engine.stop()
        rig.say(f"{label} done")


def pair(rig, start, label, name, extra):
    """A prefill and a decode engine on one store. What is late on a busy machine still comes over: recomputing it would be as right, but show less."""
    settings = {"ticket_key_file": ticket_key(rig), **UNHURRIED}
    roles = ("-p", "kv_producer"), ("-d", "kv_consumer")
    with ThreadPoolExecutor(2) as pool:  # most of a start is imports, on one core each
        return list(pool.map(lambda r: start(rig, slug(label) + r[0], kv=kvport(name, extra, role=r[1], kvport=settings)), roles))


def ticket_key(rig):
    """A key that both engines sign and check tickets with."""
    path = rig.folder / "ticket.key"
    if not path.exists():
        path.write_bytes(bytes(range(32)))
        path.chmod(0o600)
    return str(path)


ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None,
       "remote_port": None}


def disaggregated(rig):
    """Prefill and decode in two processes; the first hands its kv_transfer_params to the second."""
    texts = Texts(rig)
    for setup, extra in configs(rig, apart):
        label, name = setup.label, setup.connector
        p, d = pair(rig, Engine, label, name, extra)
        for ids, want in zip(texts.first, texts.want):
            handed = p.run(ids, 1, kvp=ASK)
            rig.check(bool(handed.kvp and handed.kvp.get("kvport_ticket")), f"{label}: no ticket in {handed.kvp}")
            rig.count("tickets")
            rig.equal(f"{label} P/D", [want], [d.run(ids, TOKENS, kvp=handed.kvp)])
        got, most = d.external(), full(texts.first)
        rig.check(got >= 0.9 * most, f"{label} P/D: {got} tokens came over, want nearly {most}")
        rig.count("external tokens", got)
        damaged = {k: v for k, v in d.metrics().items() if v > 0 and ("integrity_failures" in k or "loads_failed" in k)}
        rig.check(not damaged, f"{label} P/D: {damaged}")
        rig.count("connectors")
        p.stop()
        d.stop()
        rig.say(f"{label} done")


class VllmProxy:
    """A proxy as in vLLM's examples: prefill with max_tokens=1, then its kv_transfer_params as they are to decode."""

    def __init__(self, prefill, decode):
        self.url = ""

        def post(url, body):
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)

        class Handler(http.server.BaseHTTPRequestHandler):
            """One request at a time."""

            def do_POST(self):
                """Both halves of a completion."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                first = post(prefill + self.path, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK})
                answer = json.dumps(post(decode + self.path, {**body, "kv_transfer_params": first.get("kv_transfer_params")})).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_args):
                """Say nothing."""

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    # The same client as a server's.
    post, complete, run, all = Server.post, Server.complete, Server.run, Server.all
    name = "proxy"

    def stop(self):
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()


class Index:
    """What a router knows of an engine: its KV events, as vLLM publishes them, put together."""

    def __init__(self, folder):
        import zmq

        self.blocks, self.seen, self.salts, endpoint = {}, {}, {}, f"ipc://{folder}/events"
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)
        self.args = ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint})]

    def read(self):
        """Take what has been published; the blocks by medium."""
        import msgspec

        while self.socket.poll(200):
            for event in msgspec.msgpack.decode(self.socket.recv_multipart()[2])[1]:
                self.take(event)
        return self.blocks

    def take(self, event):
        """Take one event."""
        kind, medium = event["type"], event.get("medium")
        self.seen[kind, medium] = self.seen.get((kind, medium), 0) + len(event.get("block_hashes", "x"))
        have = self.blocks.setdefault(medium, set())
        if kind == "BlockStored":
            have.update(event["block_hashes"])
            self.salts.setdefault(medium, set()).update(salt for keys in event.get("extra_keys") or () for salt in keys or ())
        elif kind == "BlockRemoved":
            have.difference_update(event["block_hashes"])
        else:  # vLLM has emptied its own cache
            self.blocks["GPU"] = set()

    def until(self, rig, server, condition, what):
        """Wait until a condition holds of the blocks by medium; vLLM publishes when it steps."""
        nudge = rig.prompts.cut("nudge", 20)
        rig.until(lambda: server.run(nudge, 1) and condition(self.read()), what)


def served(rig):
    """`vllm serve` in its normal form with several processes: cold, warm, second turn; metrics, KV events, reset."""
    texts = Texts(rig)
    label, name, extra = storage(rig, rig.folder / "blocks")
    index = Index(rig.folder)
    server = serve(rig, "serve", kv=kvport(name, extra, kvport=UNHURRIED), args=index.args)
    three_ways(rig, server, texts, f"{label}, vllm serve")
    rig.say("three ways done")
    stored = full(texts.first) // 32
    pages(rig, server, stored)
    index.until(rig, server, lambda blocks: len(blocks.get("STORAGE", ())) >= stored, f"{stored} blocks in KV events")
    rig.show("blocks in KV events, by vLLM and by the connector", [len(index.blocks.get(medium, ())) for medium in ("GPU", "STORAGE")])
    server.run(rig.prompts.cut("salted", 100), 1, cache_salt="private")
    index.until(rig, server, lambda _: index.salts["GPU"] == index.salts["STORAGE"] == {"private"}, "the cache_salt in KV events")
    emptied(rig, server, texts, index)
    server.stop()


def pages(rig, server, stored):
    """What kvport and the plugin count is on vLLM's own /metrics: it travels with steps, about once a second."""
    nudge = rig.prompts.cut("nudge", 20)
    for name in "kvport_connector_saved_blocks_total", "kvport_connector_loaded_blocks_total":
        rig.until(lambda name=name: server.run(nudge, 1) and server.counter(name) >= stored, f"{name} of {stored} on vLLM's /metrics")
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("kvport")]
    names = {line.split("{")[0] for line in lines}
    rig.show("kvport's metrics on vLLM's page", len(names))
    rig.show("of these the plugin's own", len([n for n in names if n.startswith("kvport_connector_") and n != "kvport_connector_info"]))
    rig.check(server.counter("kvport_shim_faults_total") == 0, "exceptions were caught in hooks")


def emptied(rig, server, texts, index):
    """POST /reset_prefix_cache?reset_external=true empties the connector's cache too."""
    rig.until(lambda: server.post("/reset_prefix_cache?reset_external=true", {})[1].get("success"), "resetting the external cache")
    index.until(rig, server, lambda blocks: not blocks.get("STORAGE"), "BlockRemoved of what was reset")
    rig.show("blocks taken back by KV events", index.seen["BlockRemoved", "STORAGE"])
    before = server.external()
    rig.equal("after a reset of the external cache", texts.want[:2], server.all(texts.first[:2], TOKENS))
    rig.check(server.external() == before, f"{server.external() - before} tokens came from a cache that was emptied")
    server.reset()
    rig.equal("stored anew", texts.want[:2], server.all(texts.first[:2], TOKENS))
    rig.check(server.external() - before >= 0.9 * full(texts.first[:2]), "nothing was stored after the reset")
    rig.count("resets of the external cache")


def routed(rig):
    """Two `vllm serve`, prefill and decode, through `kvport route` and through a proxy as in vLLM's examples."""
    texts = Texts(rig)
    for setup, extra in configs(rig, line("route")):
        label, name = setup.label, setup.connector
        p, d = pair(rig, serve, label, name, extra)
        for turn, way in enumerate(("kvport route", "vLLM's proxy")):
            front = gateway(rig, way, slug(label), p, d)
            want, before = texts.want[turn::2], d.external()
            ids = texts.first[turn::2]
            rig.equal(f"{label} P/D through {way}", want, front.all(ids, TOKENS))
            got = rig.until(lambda d=d, before=before: d.external() - before, f"{label} through {way}: external tokens")
            rig.check(got >= 0.9 * full(ids), f"{label} through {way}: {got} tokens came over, want nearly {full(ids)}")
            rig.count("external tokens", got)
            rig.count(f"prompts through {way}", len(ids))
            rig.say(f"{label} through {way} done")
            front.stop()
        rig.count("connectors")
        p.stop()
        d.stop()


def gateway(rig, way, name, p, d):
    """What clients talk to."""
    if way != "kvport route":
        front = VllmProxy(p.url, d.url)
        rig.processes.append(front)
        return front
    port = free_port()
    return Server(rig, f"{name}-route", [str(ROOT / "bin" / "kvport"), "route", "--port", str(port), "--prefill", p.url, "--decode", d.url], port)
