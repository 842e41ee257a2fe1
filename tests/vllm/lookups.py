"""What requests that wait cost vLLM's scheduler, pass by pass: their lookups, all hits in a memory tier that the host reads itself."""

import os
import statistics

from rig import Engine, kvport

from connectors import configs, line

BLOCK, KEYS, SHARED = 32, 16, 14  # tokens of a block; blocks of a prompt, and those of them that seven others begin with, too
MOST = 64
BUDGET = 150e-6  # of a pass
OTHER_WORK = 0.02  # seconds of it before an empty frame, about as long as a step of the model
HOOK, LOOKUP, ASKED = "get_num_new_matched_tokens", "kvport_match_seconds", "kvport_plugin_match_seconds"


def micro(values):
    """Median, 10th and 90th percentile in microseconds: the 10th is what other work on the machine disturbs least."""
    tenths = statistics.quantiles(values, n=10)
    return f"p50 {statistics.median(values) * 1e6:.0f} us ({tenths[0] * 1e6:.0f} to {tenths[8] * 1e6:.0f})"


def middle(values):
    """The median of what is counted, as short as it can be written."""
    return f"{statistics.median(values):g}"


def questions(rig):
    """64 prompts of 16 blocks and a token: eight texts with eight questions about each."""
    texts = [rig.prompts.cut(f"text {i}", SHARED * BLOCK) for i in range(8)]
    return [texts[i % 8] + rig.prompts.cut(f"question {i}", (KEYS - SHARED) * BLOCK + 1) for i in range(MOST)]


class Waiting:
    """An engine with an empty cache of its own before each round, and a connector that has every prompt."""

    def __init__(self, rig, setup, extra):
        self.rig, self.prompts = rig, questions(rig)
        self.want = rig.options.baseline(self.prompts, 1)
        self.engine = Engine(rig, "kvport", kv=kvport(setup.connector, extra), env={"VLLM_CPU_KVCACHE_SPACE": "2"},
                             engine={"num_gpu_blocks_override": MOST * (KEYS + 2), "max_num_seqs": MOST})
        self.sent = 0
        rig.equal("cold", self.want, self.passes(MOST)[0])
        rig.say("every prompt was computed")

    def passes(self, number):
        """The results of so many requests that wait at once, and the passes of vLLM's scheduler that asked about them."""
        self.engine.ask("hooks", on=True)
        results = self.engine.together(self.prompts[:number], 1)
        passes = [s for s in self.engine.ask("hooks", on=False) if HOOK in s["names"]]
        self.sent += sum(len(s["messages"]) for s in passes)
        return results, passes

    def round(self, number):
        """The passes of vLLM's scheduler that ask about so many requests which wait at once; all are hits."""
        self.engine.reset()
        before = self.engine.external()
        results, passes = self.passes(number)
        self.rig.equal(f"{number} at once", self.want[:number], results)
        hit = self.engine.external() - before
        self.rig.check(hit == number * KEYS * BLOCK, f"{number} at once: {hit} tokens came from the connector")
        self.rig.count("hits", number)
        return passes

    def told(self):
        """The seconds that the agent has spent in Match, and how often it asked the plugin. It tells about once a second."""
        self.rig.until(lambda: self.engine.ask("agent").get(LOOKUP, (0,))[0] >= self.sent, "the agent's count of messages")
        told = self.engine.ask("agent")
        return told[LOOKUP][1], told.get(ASKED, (0,))[0]


def report(rig, what, passes, match=None):
    """Two rows: passes, and their messages with what these are made of. match: seconds that the agent spent in Match."""
    took = [s["names"][HOOK][1] for s in passes]
    messages = [m for s in passes for m in s["messages"]]
    python = [t - sum(m["seconds"] for m in s["messages"]) for t, s in zip(took, passes)]
    within = "within" if statistics.median(took) <= BUDGET else "NO"
    rig.show(f"{what}, a pass", f"{micro(took)}, budget {BUDGET * 1e6:.0f} us: {within}; {middle([len(s['messages']) for s in passes])} messages, "
             f"beside them {micro(python)}; n {len(passes)}")
    asked, answered = sum(m["requests"] for m in messages), sum(m["hits"] for m in messages)
    agent = "" if match is None else f", the agent is {match / len(messages) * 1e6:.0f} us in Match (mean)"
    rig.show(f"{what}, a message", f"{micro([m['seconds'] for m in messages])}: vLLM's thread computes {micro([m['computed'] for m in messages])} and waits "
             f"{micro([m['seconds'] - m['computed'] for m in messages])}{agent}; {middle([m['requests'] for m in messages])} requests with "
             f"{middle([m['keys'] for m in messages])} keys; {answered} of {asked} questions were answered with a hit, {sum(m['unanswered'] for m in messages)} not in time; n {len(messages)}")


def lookups(rig):
    """1, 8 and 64 that wait, again and again, and 8 and 64 after one that waited alone; and what an empty frame takes there and back."""
    for setup, extra in configs(rig, line("lookups")):
        waiting = Waiting(rig, setup, extra)
        asked = 0
        for number in 1, 8, MOST:
            for _ in range(2):
                waiting.round(number)  # warms everything up
            before = waiting.told()
            passes = [p for _ in range(rig.options.pairs) for p in waiting.round(number)]
            match, more = (b - a for a, b in zip(before, waiting.told()))
            asked += more
            report(rig, f"{number} waiting", passes, match)
        for number in 8, MOST:
            report(rig, f"{number} waiting after one alone", [p for _ in range(rig.options.pairs) for p in (waiting.round(1), waiting.round(number))[1]])
        rig.show("an empty frame after 20 ms of other work", micro(waiting.engine.ask("empty", n=100, after=OTHER_WORK)))
        rig.show("an empty frame after another one", micro(waiting.engine.ask("empty", n=1000, after=0)))
        rig.show("load", f"{os.getloadavg()[0]:.1f}")
        rig.check(asked == 0, f"the plugin was asked {asked} times about blocks that the host knows")
