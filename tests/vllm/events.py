"""A line about KV events: two `vllm serve` behind `kvport route --policy prefix_aware`, which knows what each of them has."""

import functools
import json
import random
import re
import threading
import typing
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from rig import ROOT, Result, Server, free_port, serve

TOKENS = 32  # of an answer
BLOCK = 32
BLOCKS = 128  # of each cache, few enough that blocks are evicted
KINDS = ("tokens", "text", "chat")  # the forms of a prompt, in turn


class Ask(typing.NamedTuple):
    """A request, and what vLLM answers that is asked directly."""

    kind: str
    pieces: tuple  # what was said: something that many prompts begin with, question, answer, question, ...
    prompt: tuple  # tokens
    said: object  # the answer, as the next turn repeats it
    want: tuple  # the tokens of the answer

    @property
    def path(self):
        """Where it goes."""
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"

    @property
    def body(self):
        """The part of the request that is the prompt."""
        return prompt_of(self.kind, self.pieces)


class Row(typing.NamedTuple):
    """What became of a request through the router."""

    part: str
    kind: str
    tokens: int  # of the prompt
    predicted: int  # of these in the cache, as the router says
    reported: int  # as vLLM says
    known: bool  # the router had the prompt's tokens, so events decided
    most: bool  # it went to the instance that holds most


def prompt_of(kind, pieces):
    """The prompt of a request."""
    if kind == "chat":
        roles = ["system"] + ["user", "assistant"] * len(pieces)
        return {"messages": [{"role": role, "content": text} for role, text in zip(roles, pieces)]}
    return {"prompt": "".join(pieces) if kind == "text" else [token for piece in pieces for token in piece]}


def send(server, path, prompt, tokens=TOKENS, explain=False, **more):
    """A greedy request; (JSON, the router's reasons)."""
    body = {"model": "m", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **prompt, **more}
    headers = {"Content-Type": "application/json", **({"X-Kvport-Route": "1"} if explain else {})}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, json.dumps(body).encode(), headers), timeout=300) as answer:
        return json.load(answer), answer.headers.get("X-Kvport-Route", "")


def result(answer):
    """The tokens of an answer."""
    return Result(ids=answer["choices"][0]["token_ids"], finish=answer["choices"][0]["finish_reason"])


def cached(answer):
    """How many tokens of the prompt vLLM did not compute."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class Feed:
    """What one vLLM has, by its own events, read without kvport: it has seen all of them."""

    def __init__(self, folder, name):
        import zmq

        self.endpoint, self.replay = f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay"
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint, "replay_endpoint": self.replay}
        self.args = ["--kv-events-config", json.dumps(config)]
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(self.endpoint)
        self.messages = self.events = self.removed = self.cleared = 0
        self.blocks = {}  # all tokens up to the end of a block, by its hash

    def read(self, rig):
        """Take what has been published."""
        import msgspec

        while self.socket.poll(0):
            _, number, batch = self.socket.recv_multipart()
            rig.check(int.from_bytes(number, "big") == self.messages, f"the test has not seen message {self.messages} of {self.endpoint}")
            self.messages += 1
            for event in msgspec.msgpack.decode(batch)[1]:
                self.events += 1
                self.take(event)

    def take(self, event):
        """Take one event."""
        if event["type"] == "BlockStored":
            prefix = self.blocks.get(event["parent_block_hash"]) if event["parent_block_hash"] else ()
            for i, name in enumerate(event["block_hashes"] if prefix is not None else ()):
                prefix += tuple(event["token_ids"][i * BLOCK:(i + 1) * BLOCK])
                self.blocks[name] = prefix
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.removed += self.blocks.pop(name, None) is not None
        else:
            self.cleared += 1
            self.blocks.clear()

    def held(self, prompt):
        """How many tokens of a prompt are there. The last one is always computed."""
        have = set(self.blocks.values())
        n = 0
        while n + BLOCK < len(prompt) and prompt[:n + BLOCK] in have:
            n += BLOCK
        return n

    def stop(self):
        """Read no more."""
        self.socket.close(0)


class Instance:
    """A `vllm serve` that publishes events, what they say, and what it was sent."""

    def __init__(self, rig, name):
        self.rig, self.feed = rig, Feed(rig.folder, name)
        rig.processes.append(self.feed)
        more = ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(BLOCKS)]
        self.server = serve(rig, f"vllm-{name}", args=[*self.feed.args, *more])
        self.requests = self.hits = self.nudges = 0

    def direct(self, path, prompt, tokens=TOKENS, **more):
        """A request that no router sees; its answer."""
        answer, _ = send(self.server, path, prompt, tokens, **more)
        self.note(answer)
        return answer

    def note(self, answer):
        """Count an answer of this instance."""
        self.requests += 1
        self.hits += cached(answer)

    def settle(self):
        """Wait until all is seen that was published before: a prompt of its own fills a block, which is published last."""
        self.nudges += 1
        nudge = self.rig.prompts.cut(f"nudge {self.server.name} {self.nudges}", BLOCK + 1)
        self.direct("/v1/completions", {"prompt": nudge}, 1)

        def seen():
            self.feed.read(self.rig)
            return self.feed.held(tuple(nudge))

        self.rig.until(seen, f"events of {self.server.name}", 120)


class Router:
    """`kvport route` over the two, with what it says about each request."""

    def __init__(self, rig, name, pair, endpoints):
        port = free_port()
        command = [str(ROOT / "bin" / "kvport"), "route", "--port", str(port), "--policy", "prefix_aware"]
        for one, endpoint in zip(pair, endpoints):
            command += ["--decode", one.server.url, "--kv-events", f"{one.server.url}={endpoint},{one.feed.replay}"]
        self.rig, self.pair, self.rows = rig, pair, []
        self.computed = [0] * len(pair)  # tokens, for this router
        self.server = Server(rig, name, command, port)
        self.sync(*pair)

    def events(self, what):
        """One of its counts of events."""
        return int(self.server.counter("kvport_router_kv_events_total", f'what="{what}"'))

    def tokenized(self):
        """Of how many prompts it had the tokens."""
        name = "kvport_router_tokenize_total"
        return self.server.counter(name) - self.server.counter(name, 'result="failed"')

    def idle(self):
        """Wait until it has no request."""
        self.rig.until(lambda: not self.server.counter("kvport_router_requests_in_flight"), f"{self.server.name}: the end of requests")

    def sync(self, *instances):
        """Wait until the router knows what the instances have published."""
        for one in instances:
            one.settle()
        feeds = [one.feed for one in self.pair]
        self.rig.until(lambda: self.events("events") == sum(feed.events for feed in feeds), f"{self.server.name}: all events", 120)
        self.idle()
        known, have = int(self.server.counter("kvport_router_kv_index_blocks")), sum(len(feed.blocks) for feed in feeds)
        self.rig.check(known == have, f"{self.server.name} knows of {known} blocks, the instances have {have}")
        wrong = {what: n for what in ("lost", "invalid") if (n := self.events(what))}
        self.rig.check(not wrong, f"{self.server.name}: {wrong}")

    def take(self, part, ask, answer, why):
        """Compare an answer's tokens and note the rest; the number of the instance that gave it."""
        want = ask.want[:answer["usage"]["completion_tokens"]]
        self.rig.equal(f"{part}, {ask.kind}", [Result(ids=want)], [result(answer)])
        at = re.search(r"decode=(\S+);.* holds (\d+) of (\d+) tokens", why)
        self.rig.check(at, f"the router says {why!r}")
        chosen = [one.server.url for one in self.pair].index(at[1])
        self.pair[chosen].note(answer)
        self.computed[chosen] += len(ask.prompt) - int(at[2])
        self.rows.append(Row(part, ask.kind, len(ask.prompt), int(at[2]), cached(answer), False, False))
        return chosen

    def predict(self, part, ask, tokens=TOKENS):
        """A request whose instance and hit are known before, by events alone."""
        held = [one.feed.held(ask.prompt) for one in self.pair]
        tokenized = self.tokenized()
        chosen = self.take(part, ask, *send(self.server, ask.path, ask.body, tokens, explain=True))
        if self.tokenized() > tokenized:  # else an instance was too busy to say a text's tokens in time
            row = self.rows[-1] = self.rows[-1]._replace(known=True, most=held[chosen] == max(held))
            what = f"the instances hold {held} tokens, number {chosen} was chosen, {row}"
            self.rig.check(row.predicted == held[chosen], f"the router predicts something else: {what}")
            self.rig.check(row.reported == row.predicted, f"vLLM had something else: {what}")
            # The policy counts a tenth of what an instance computed lately as its load.
            better = [h - held[chosen] > self.computed[i] / 10 for i, h in enumerate(held)]
            self.rig.check(not any(better) or self.unwell(), f"the other one was to be chosen: {what}")
        self.sync(self.pair[chosen])

    def unwell(self):
        """Whether it could not reach an instance meanwhile."""
        return "instance changed state" in self.server.log.read_text(encoding="utf-8")

    def stop(self):
        """End it; its own sums are those of the test."""
        self.idle()
        for kind, of in ("prompt", "tokens"), ("expected", "predicted"), ("cached", "reported"):
            want = sum(getattr(row, of) for row in self.rows)
            got = int(self.server.counter("kvport_router_prefix_tokens_total", f'kind="{kind}"'))
            self.rig.check(got == want, f"{self.server.name}: kvport_router_prefix_tokens_total of {kind} is {got}, want {want}")
        self.server.stop()


class Relay:
    """Passes an instance's events on to a router, and loses those that it is told to."""

    def __init__(self, rig, feed):
        import zmq

        self.endpoint, self.lose, self.passed, self.ended = f"{feed.endpoint}-relay", 0, 0, threading.Event()
        self.inlet, self.outlet = (zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.PUB))
        self.inlet.setsockopt(zmq.SUBSCRIBE, b"")
        self.inlet.connect(feed.endpoint)
        self.outlet.bind(self.endpoint)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        rig.processes.append(self)

    def run(self):
        """Pass on until it ends."""
        while not self.ended.is_set():
            if self.inlet.poll(20):
                message = self.inlet.recv_multipart()
                if self.lose:
                    self.lose -= 1
                else:
                    self.outlet.send_multipart(message)
                    self.passed += 1
        self.inlet.close(0)
        self.outlet.close(0)

    def stop(self):
        """End it."""
        self.ended.set()
        self.thread.join()


class Plan:
    """All requests: conversations that fork after their first answer, and single prompts."""

    def __init__(self, rig, instance):
        self.rig, self.instance = rig, instance
        self.text = (ROOT / "LICENSE").read_text(encoding="utf-8")
        self.turns = [], [], []
        for n in range(max(len(KINDS), rig.options.prompts // 2)):
            kind = KINDS[n % len(KINDS)]
            first = self.turn(0, kind, self.words(kind, f"system of {kind}", 320), self.words(kind, f"question {n}", 75))
            for fork in range(2):
                second = self.turn(1, kind, *first.pieces, first.said, self.words(kind, f"question {n} {fork}", 75))
                self.turn(2, kind, *second.pieces, second.said, self.words(kind, f"more {n} {fork}", 75))
        self.strangers = [self.ask("tokens", [rig.prompts.cut(f"stranger {n}", 700)]) for n in range(3)]
        self.whole = self.ask("tokens", [rig.prompts.cut("whole blocks", 16 * BLOCK)])

    def words(self, kind, name, tokens):
        """About so many tokens, as a part of a prompt."""
        if kind == "tokens":
            return self.rig.prompts.cut(f"events {name}", tokens)
        start = random.Random(f"{self.rig.options.seed} {name}").randrange(len(self.text) - 5 * tokens)
        return f"\n{name}: {self.text[start:start + 4 * tokens]}"

    def turn(self, number, kind, *pieces):
        """One turn of a conversation."""
        ask = self.ask(kind, pieces)
        self.turns[number].append(ask)
        return ask

    def ask(self, kind, pieces):
        """A request and its answer."""
        bare = Ask(kind, tuple(pieces), (), "", ())
        answer = self.instance.direct(bare.path, bare.body)
        choice = answer["choices"][0]
        said = {"tokens": choice["token_ids"], "text": choice.get("text")}.get(kind) or choice.get("message", {}).get("content") or ""
        prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
        return bare._replace(prompt=tuple(prompt), said=said, want=tuple(choice["token_ids"]))


def events(rig):
    """Conversations through the router: the router restarted, events lost, blocks evicted, requests at a time."""
    with ThreadPoolExecutor(2) as pool:
        a, b = pool.map(functools.partial(Instance, rig), ("a", "b"))
    plan = Plan(rig, a)
    a.server.reset()
    rig.say(f"one vLLM without a router has answered {a.requests} requests")
    first = Router(rig, "route", (a, b), (a.feed.endpoint, b.feed.endpoint))
    rig.check(a.feed.cleared == 1 and a.feed.events > 10, f"{a.feed.events} events before the router, {a.feed.cleared} resets")
    for number, name in enumerate(("first turns", "second turns, forks")):
        for ask in plan.turns[number]:
            first.predict(name, ask)
        rig.say(f"{name} done")
    first.stop()
    relay = Relay(rig, b.feed)
    rig.until(lambda: b.settle() or relay.passed, "an event through the relay", 120)
    second = Router(rig, "route-again", (a, b), (a.feed.endpoint, relay.endpoint))
    for ask in plan.turns[2]:
        second.predict("third turns, router restarted", ask)
    rig.show("messages that the restarted router got by replay", second.events("replayed"))
    lose(rig, second, relay, plan)
    evict(rig, second, plan)
    for _ in range(2):
        second.predict("a prompt that ends with a block", plan.whole, 1)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda ask: send(second.server, ask.path, ask.body, explain=True), plan.turns[2]))
    for ask, answer in zip(plan.turns[2], answers):
        second.take("third turns, 4 at a time", ask, *answer)
    unlooked(rig, second, plan)
    second.stop()
    told(rig, (a, b))
    table(rig, first.rows + second.rows)


def lose(rig, router, relay, plan):
    """Events about prompts that the router has never seen do not reach it: it notices and has them replayed."""
    b = router.pair[1]
    for ask in plan.strangers:
        relay.lose, gaps, replayed = 1, router.events("gaps"), router.events("replayed")
        b.direct(ask.path, ask.body, 1)
        router.sync(b)
        rig.check(not relay.lose and router.events("gaps") > gaps and router.events("replayed") > replayed, "no gap was filled")
        router.predict("events lost and replayed", ask)
        rig.check(router.rows[-1].reported > 600, f"a prompt that only the second instance has: {router.rows[-1]}")
    rig.count("gaps in events filled by a replay", router.events("gaps"))
    rig.say("gaps done")


def evict(rig, router, plan):
    """Blocks make room for prompts that the router does not see: it predicts what is left."""
    before = [sum(router.pair[i].feed.held(ask.prompt) for ask in plan.turns[2]) for i in range(2)]
    for one in router.pair:
        removed, n = one.feed.removed, 0
        while one.feed.removed - removed < BLOCKS // 2:
            rig.check(n < 8, f"only {one.feed.removed - removed} blocks were evicted")
            one.direct("/v1/completions", {"prompt": rig.prompts.cut(f"filler {one.server.name} {n}", 1150)}, 1)
            router.sync(one)
            n += 1
    after = [sum(router.pair[i].feed.held(ask.prompt) for ask in plan.turns[2]) for i in range(2)]
    rig.check(sum(after) < sum(before), f"of the conversations {before} tokens were held and now {after}")
    for ask in plan.turns[2]:
        router.predict("blocks evicted", ask, 1)
    rig.show("blocks evicted", sum(one.feed.removed for one in router.pair))


def unlooked(rig, router, plan):
    """What docs/router.md says about cache queries under vLLM."""
    ask, query, one = plan.turns[0][0], {"kv_transfer_params": {"cache_query": True}}, router.pair[0]
    answer = one.direct(ask.path, ask.body, **query)
    rig.equal("a cache query", [Result(ids=ask.want)], [result(answer)])
    rig.check("kvport_cache" not in json.dumps(answer), f"vLLM has answered a cache query: {answer}")
    status, _ = router.server.post(ask.path, {"model": "m", **ask.body, **query})
    rig.check(status == 400, f"the router answers a cache query with {status}")
    status, _ = one.server.post(ask.path, {"model": "m", **ask.body, "max_tokens": 0})
    rig.check(status == 400, f"vLLM answers max_tokens 0 with {status}")
    answer = one.direct(ask.path, ask.body, 0, echo=True)
    rig.check(answer["usage"]["completion_tokens"] == 1, f"vLLM has computed no token: {answer}")
    says = json.loads(one.server.get("/kv_event_sources"))["0"]
    rig.check([says["endpoint"], says["replay_endpoint"]] == [one.feed.endpoint, one.feed.replay], f"/kv_event_sources is {says}")


def told(rig, pair):
    """vLLM's own counts: it got the requests that the test knows of, thus no question of the router, and had the same hits."""
    for one in pair:
        for name, want in ("vllm:request_success_total", one.requests), ("vllm:prefix_cache_hits_total", one.hits):
            rig.until(lambda name=name, want=want, one=one: one.server.counter(name) == want, f"{one.server.name}: {name} of {want}")
        rig.count("requests", one.requests)


def table(rig, rows):
    """What was predicted and what vLLM reported, by part."""
    shape = "{:30} {:>8} {:>7} {:>9} {:>8} {:>9} {:>8}"
    rig.notes.append(shape.format("", "requests", "tokens", "predicted", "reported", "by events", "best one"))
    for part in dict.fromkeys(row.part for row in rows):
        of = [row for row in rows if row.part == part]
        rig.notes.append(shape.format(part, len(of), *(sum(column) for column in list(zip(*of))[2:])))
    rig.notes.append("by events: requests whose hit was predicted by events; where a text's tokens are not had in time, the router guesses.")
    rig.notes.append("best one: those of them at the instance that holds most of the prompt. 4 at a time nothing is required but equal tokens.")
    for kinds in ("tokens",), ("text", "chat"):
        hits = [row for row in rows if row.known and row.reported and row.kind in kinds]
        rig.check(hits, f"no hit of {' or '.join(kinds)} was predicted by events")
        rig.show(f"hits of {' and '.join(kinds)} predicted by events", len(hits))
