"""The line about the command that docs/sglang.md shows: its config and deadlines as they stand, in the server that users start."""

import json
import re
import shlex
import sys
import urllib.error
import urllib.request

from connectors import storage
from rig import ROOT, Failed, Result, Server, free_port
from served import TOKENS, full, surroundings

PAGE = 64  # tokens, as the page has it

# What SGLang needs on a CPU, and what makes its answers comparable.
ON_A_CPU = ("--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --disable-overlap-schedule "
            "--skip-server-warmup --random-seed 1 --max-running-requests 4 --max-total-tokens 8192 --context-length 4096 --mem-fraction-static 0.6 "
            "--enable-cache-report --sleep-on-idle")


def shown():
    """The arguments of the first command of the page that starts SGLang."""
    text = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    command = re.search(r"^python -m sglang\.launch_server .*?\n```$", text, re.M | re.S)
    if not command:
        raise Failed("docs/sglang.md shows no command that starts SGLang")
    return shlex.split(command.group().removesuffix("```").replace("\\\n", " "))[3:]


class Launched(Server):
    """sglang.launch_server with the arguments of the page."""

    def __init__(self, rig, name, folder):
        arguments, port = shown(), free_port()
        at = arguments.index("--hicache-storage-backend-extra-config") + 1
        config = json.loads(arguments[at])
        store = config["kv_transfer_config"]["kv_connector_extra_config"]
        rig.check(arguments[arguments.index("--page-size") + 1] == str(PAGE), "the page shows another size of pages")
        rig.check(config["kv_transfer_config"]["kv_connector"] == storage(rig, folder)[1], "the page shows another connector than a store of files")
        store["shared_storage_path"] = str(folder)
        arguments[at] = json.dumps(config)
        arguments[arguments.index("--model-path") + 1] = str(rig.model)
        super().__init__(rig, name, [sys.executable, "-m", "sglang.launch_server", *arguments, *ON_A_CPU.split(), "--host", "127.0.0.1", "--port", str(port)],
                         port, surroundings(rig, {}))

    def answers(self, prompts):
        """The answers to some prompts, one after another, and how many of their tokens came from the store."""
        results = []
        for prompt in prompts:
            asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
            status, answer = self.post("/generate", asked)
            if status != 200:
                raise Failed(f"{self.name} answered {status}: {answer}")
            results.append(Result(ids=answer["output_ids"], finish=answer["meta_info"]["finish_reason"]["type"],
                                  stored=int((answer["meta_info"].get("cached_tokens_details") or {}).get("storage") or 0)))
        return results

    def flush(self):
        """Empty the caches of device and host, once everything is stored."""
        def flushed():
            try:
                with urllib.request.urlopen(urllib.request.Request(self.url + "/flush_cache", b""), timeout=60) as answer:
                    return answer.status == 200
            except urllib.error.HTTPError:
                return False

        self.rig.until(flushed, f"{self.name}: emptying its caches", 120)


def page(rig):
    """Twice the server of the page on one folder: cold, from the store, and from the store in another process.

    The deadline for a question is short, so on a busy machine it may be asked in vain: what it answers is right all the same, and it is asked again.
    """
    prompts = rig.prompts.set("page", [700, 500])
    want, folder = rig.want(prompts), rig.folder / "blocks"
    for name in "first", "second":
        server = Launched(rig, name, folder)
        for what in ("cold", "warm") if name == "first" else ("warm",):
            got = server.answers(prompts)
            rig.equal(f"{name}, {what}", want, got)
            if what == "cold":
                rig.check(not any(g.stored for g in got), f"{name}: pages were found that nobody has stored")
                server.flush()
                continue
            tries = 1
            while any(g.stored < full(p, PAGE) for g, p in zip(got, prompts, strict=True)):
                rig.check(tries < 10, f"{name}: {[g.stored for g in got]} tokens came from the store, want all whole pages of {[len(p) for p in prompts]}")
                server.flush()
                got, tries = server.answers(prompts), tries + 1
                rig.equal(f"{name}, {what} again", want, got)
            rig.count("tokens from storage", sum(g.stored for g in got))
            rig.count("tries", tries)
        server.stop()
        rig.say(f"the {name} server holds")
