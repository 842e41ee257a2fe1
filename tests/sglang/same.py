"""Lines about equal tokens: every way of a page, and pages that are not ours."""

import functools
import itertools
import json
import shutil

from connectors import storage, typical
from faults import find
from rig import ROOT, Failed, Server, free_port, kvport, tail
from rig import Engine as VLLM
from served import LAYOUTS, PAGE, TOKENS, Ahead, SGLang, check_cached, extra, full, named, stored

PAGE_BYTES = 2 * 30 * PAGE * 3 * 64 * 4  # K and V, layers, tokens, heads, of a head, float32
BLOCK = 32  # tokens of a block of vLLM on a CPU: no fewer, so pages are as long where there is a vLLM
SMALL = 2048  # tokens on a device that soon evicts


def evict(rig, engine):
    """Have other prompts take the place of what the device holds; the host has room for all of them."""
    for i in range(2):
        engine.run([rig.prompts.cut(f"evicts {i}", SMALL // 2 - PAGE)], 1)


def ways(rig, label, engine, prompts, want):
    """Cold, from the device, from the host, and from the store once both are empty."""
    rig.equal(f"{label}, cold", want, engine.run(prompts))
    again = engine.run(prompts)
    rig.equal(f"{label}, from the device", want, again)
    check_cached(rig, f"{label}, device", again, prompts, "device")
    evict(rig, engine)
    for prompt, answer in zip(prompts, want, strict=True):
        got = engine.run([prompt])
        rig.equal(f"{label}, from the host", [answer], got)
        rig.check(got[0].cached["host"] > 0, f"{label}: nothing came from the host: {got[0].cached}")
        rig.count("tokens from host", got[0].cached["host"])
    engine.flush()
    got = engine.run(prompts)
    rig.equal(f"{label}, from the store", want, got)
    check_cached(rig, label, got, prompts, "storage")


def equal_cases(rig):
    """(label, setup, config, layout, more of the extra config): every connector, every layout in two processes, tensors; in short, one store of files."""
    setups, whole = sorted(stored(rig), key=lambda pair: not pair[0].shared), rig.options.all and not rig.options.connector
    if not rig.options.all and not rig.options.connector:
        setups = [pair for pair in setups if typical(pair[0])]
    layouts = itertools.cycle(LAYOUTS)
    cases = [(f"{setup.label}, {layout}", setup, config, layout, {}) for (setup, config), layout in zip(setups, layouts, strict=False)]
    for setup, _ in setups:
        if typical(setup) and rig.options.all:
            cases.append((f"{setup.label}, tensors", setup, setup.fill(rig, rig.folder / "tensors"), "layer_first", {"interface_v1": 0}))
    rig.check(bool(cases), "no connector was run")
    if whole:
        rig.check({s.connector for s, _ in setups} == named(), f"run were {[s.connector for s, _ in setups]}, want {sorted(named())}")
        rig.check({layout for _, s, _, layout, _ in cases if s.shared} == set(LAYOUTS), "a layout was not run in two processes")
    return cases


def starts(rig, cases):
    """What starts the engines of some cases: one that evicts soon, and where others can read its store, a new one."""
    for label, setup, config, layout, more in cases:
        name, kept = label.replace(" ", "-").replace(",", ""), extra(setup.connector, config, **more)
        yield functools.partial(SGLang, rig, name, kept, layout, max_total_tokens=SMALL)
        if setup.shared and not more:
            yield functools.partial(SGLang, rig, name + "-new", kept, layout)


def equal(rig):
    """All ways of a page, each connector and layout; then in a new engine, which goes on with a longer prompt."""
    cases = equal_cases(rig)
    engines = Ahead(starts(rig, cases))
    prompts = rig.prompts.set("ways", [297, 500])
    want = rig.want(prompts)
    turn = [p + list(w.ids) + rig.prompts.cut("turn", 24) for p, w in zip(prompts, want, strict=True)]
    want2 = rig.want(turn)
    for label, setup, _, _, more in cases:
        engine = engines.take()
        ways(rig, label, engine, prompts, want)
        engine.check_calls()
        engine.leave()
        if setup.shared and not more:
            engine = engines.take()
            got = engine.run(turn)
            rig.equal(f"{label}, a new engine", want2, got)
            check_cached(rig, f"{label}, a new engine", got, prompts, "storage")
            engine.stop()
            rig.count("new engines")
        rig.count("ways to keep pages")
        rig.say(f"{label} holds")


def pages_in(folder):
    """The files that hold a page."""
    return {p for p in folder.rglob("*") if p.is_file() and p.stat().st_size >= PAGE_BYTES}


def spoil(files):
    """Change 4 KiB amid every page."""
    for path in files:
        with open(path, "r+b") as f:
            f.seek(PAGE_BYTES // 2)
            old = f.read(4096)
            f.seek(PAGE_BYTES // 2)
            f.write(bytes(b ^ 0xFF for b in old))


def damaged(rig):
    """A hundred damaged pages; not in short, the same damage under SGLang's own backend, to see that it matters."""
    shared, prompts = rig.options.shared, rig.prompts.set("damaged", [545, 560, 575])  # 34 or 35 whole pages each
    want, pages = rig.want(prompts), sum(full(p) // PAGE for p in prompts)
    engine, own = shared.both(rig) if rig.options.all else (shared.kvport(rig), None)
    before = pages_in(shared.blocks)
    rig.equal("cold", want, engine.run(prompts))
    engine.flush()
    # Pages that are filled while an answer is made are stored too, and a prompt never asks for its own: spoil all.
    files, known = pages_in(shared.blocks) - before, engine.number("kvport_integrity_failures_total")
    rig.check(len(files) >= pages >= 100, f"{len(files)} pages were stored, {pages} are asked for")
    spoil(files)
    got = engine.run(prompts)
    rig.equal("damaged", want, got)
    rig.check(not any(r.cached["storage"] for r in got), f"damaged pages were taken: {[r.cached for r in got]}")
    engine.flush()
    counted = engine.number("kvport_integrity_failures_total") - known
    rig.check(counted == pages, f"{counted} pages are counted as damaged, {pages} were asked for")
    engine.shows("kvport_integrity_failures_total", known + counted)
    rig.show("damaged pages that were asked for", pages)
    rig.show("counted as damaged", counted)
    got = engine.run(prompts)
    rig.equal("mended", want, got)
    check_cached(rig, "mended", got, prompts, "storage")
    engine.check_calls()
    if own:
        spoiled_too(rig, own, prompts, want, len(files))


def spoiled_too(rig, own, prompts, want, pages):
    """The control: the same damage under SGLang's own backend, which stores as many pages, changes answers."""
    before = pages_in(rig.options.shared.own)
    rig.equal("file, cold", want, own.run(prompts))
    own.flush()
    same = pages_in(rig.options.shared.own) - before
    rig.check(len(same) == pages, f"SGLang's own backend stored {len(same)} pages, ours {pages}")
    spoil(same)
    got = own.run(prompts)
    wrong = sum(list(w.ids) != list(g.ids) for w, g in zip(want, got, strict=True))
    rig.check(wrong > 0, "the damage changes nothing under SGLang's own backend either, so it shows nothing")
    rig.show("wrong answers of SGLang's own backend after the same damage", f"{wrong} of {len(prompts)}")


def other_weights(rig):
    """A model that differs from ours in one tensor."""
    from safetensors.torch import load_file, save_file

    folder = rig.folder / "other-model"
    shutil.copytree(rig.model, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("layers.0.input_layernorm.weight"))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def others(rig):
    """Engines of another layout, page size, dtype and model on the same folder find nothing, and then their own; in short, of another layout."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    kept = extra(connector, config)
    prompts = [rig.prompts.cut("others", 400)]
    want = rig.want(prompts)
    asked, cases = set(), other_engines(rig, prompts, want)
    for name, (more, answers) in cases.items():
        engine = SGLang(rig, name.replace(" ", "-"), kept, **more)
        cold = engine.run(prompts)
        rig.check(cold[0].cached["storage"] == 0, f"{name}: pages of another engine were taken: {cold[0].cached}")
        asked.add(engine.calls("batch_exists")[0]["first"])
        device = engine.run(prompts)
        engine.flush()
        warm = engine.run(prompts)
        for what, got in ("cold", cold), ("from the device", device), ("its own pages", warm):
            if answers:
                rig.equal(f"another {name}, {what}", answers, got)
        # In bfloat16 it changes an answer how many tokens are computed together: as many as after a hit on the device.
        rig.equal(f"another {name}, its own pages and those of the device", device, warm)
        check_cached(rig, name, warm, prompts, "storage", more.get("page_size", PAGE))
        engine.check_calls()
        engine.leave()
        rig.count("engines on one folder, none of which took another's page")
    sizes = {more.get("page_size", PAGE) for more, _ in cases.values()}
    rig.check(len(asked) == len(sizes), f"SGLang's own keys differ: {len(asked)} of {len(cases)}, so this shows nothing")
    rig.show("different first keys that SGLang asked for", len(asked))
    if rig.options.all:
        one_shape(rig, prompts, want)


def other_engines(rig, prompts, want):
    """{name: (how it is started, what it must answer)}; in short, the first two."""
    cases = {"first": ({}, want), "layout": ({"layout": "page_first_direct"}, want)}
    if rig.options.all:
        model = other_weights(rig)
        cases |= {
            "page size": ({"page_size": 32}, want),
            "dtype": ({"dtype": "bfloat16"}, None),  # which transformers rounds in another order
            "model": ({"model_path": str(model)}, rig.want(prompts, model=model)),
        }
    return cases


def one_shape(rig, prompts, want):
    """The control: with the shape left out of the fingerprint, the engine of another layout takes the pages of the first, and answers wrongly."""
    _, connector, config = storage(rig, rig.folder / "one-shape")
    kept, env = extra(connector, config), {"ONE_SHAPE": "1"}
    first = SGLang(rig, "control-first", kept, env=dict(env))
    rig.equal("the control, first", want, first.run(prompts))
    first.leave()
    engine = SGLang(rig, "control-layout", kept, layout="page_first_direct", env=dict(env))
    got = engine.run(prompts)
    rig.check(got[0].cached["storage"] == full(prompts[0]), f"without the shape no page is taken either, so this line shows nothing: {got[0].cached}")
    rig.check(list(got[0].ids) != list(want[0].ids), "pages of another layout change no answer, so this line shows nothing")
    rig.show("control, tokens of another layout that are taken without the shape in the fingerprint, and a wrong answer", got[0].cached["storage"])
    engine.stop()


def updated(rig):
    """Weights are changed in a running engine: pages of the old ones are not taken, nor are the new ones' taken for those."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    kept, model = extra(connector, config), other_weights(rig)
    prompts = [rig.prompts.cut("updated", 400)]
    old, new = rig.want(prompts), rig.want(prompts, model=model)
    rig.check([w.ids for w in old] != [w.ids for w in new], "both models answer the same, so this shows nothing")
    engine = SGLang(rig, "engine", kept)
    rig.check(not (names := engine.ask("unknown")), f"this SGLang has no arguments {names}")
    rig.equal("the weights of the start", old, engine.run(prompts))
    engine.flush()
    got = engine.run(prompts)
    rig.equal("the weights of the start, from the store", old, got)
    check_cached(rig, "the weights of the start", got, prompts, "storage")
    engine.flush()
    rig.check(engine.ask("update", model=str(model)), "SGLang has not changed its weights")
    got = engine.run(prompts)
    rig.equal("other weights", new, got)
    rig.check(got[0].cached["storage"] == 0, f"pages of the old weights were taken: {got[0].cached}")
    engine.flush()
    got = engine.run(prompts)
    rig.equal("other weights, from the store", new, got)
    check_cached(rig, "other weights", got, prompts, "storage")
    engine.check_calls()
    engine.leave()
    last = SGLang(rig, "last", kept)
    got = last.run(prompts)
    rig.equal("a new engine", old, got)
    check_cached(rig, "a new engine", got, prompts, "storage")
    last.check_calls()
    last.stop()


def plant(targets, contents):
    """Have the store offer what another engine wrote: put its content where a file is looked for."""
    for path, content in zip(sorted(targets), itertools.cycle(contents)):
        path.write_bytes(content)


class Folder:
    """The files of a store, and who wrote them."""

    def __init__(self, path):
        self.path, self.of, self.contents = path, {}, {}

    def new(self):
        """The files that nobody was said to have written."""
        return set(find(self.path)) - set().union(*self.of.values())

    def wrote(self, name):
        """Say who wrote them; give their number."""
        self.of[name] = self.new()
        self.contents[name] = [p.read_bytes() for p in sorted(self.of[name])]
        return len(self.of[name])

    def plant(self, by, name):
        """Put what one engine wrote where another looks for its own."""
        plant(self.of[name], self.contents[by])


def engines(rig):
    """vLLM, kvport's engine and SGLang on one folder: none is offered what another wrote, and each finds its own.

    The control: with another's content in the place of its own, each is offered that. It is refused and counted, so this would have been seen before.
    """
    _, connector, config = storage(rig, rig.folder / "blocks")
    folder = Folder(rig.folder / "blocks")
    ours, theirs = [rig.prompts.cut("of SGLang", 300)], [rig.prompts.cut("of the others", 300)]
    whole = 300 // BLOCK  # pages or blocks of a prompt
    sglang = Ahead(functools.partial(SGLang, rig, name, extra(connector, config), page_size=BLOCK) for name in ("first", "last"))
    want_ours, want_theirs = rig.want(ours), rig.want(theirs)
    first = sglang.take()
    rig.equal("SGLang", want_ours, first.run(ours))
    first.leave()
    rig.check((n := folder.wrote("SGLang")) >= whole, f"SGLang wrote {n} pages, want {whole}")
    by_the_vllm(rig, connector, config, ours + theirs, want_ours + want_theirs, folder)
    by_kvport_serve(rig, connector, config, ours + theirs, folder)
    last = sglang.take()
    got = last.run(theirs)
    rig.equal("SGLang afterwards", want_theirs, got)
    rig.check(got[0].cached["storage"] == 0, f"SGLang took what others wrote: {got[0].cached}")
    got = last.run(ours)
    rig.equal("SGLang afterwards", want_ours, got)
    check_cached(rig, "SGLang's own pages", got, ours, "storage", BLOCK)
    failed = "kvport_sglang_get_failed_pages_total"
    rig.check((n := last.number(failed)) == 0, f"SGLang was offered {n} pages of others")
    last.flush()
    folder.plant("vLLM", "SGLang")
    got = last.run(ours)
    rig.equal("SGLang, vLLM's blocks in the place of its pages", want_ours, got)
    rig.check(got[0].cached["storage"] == 0, f"SGLang took vLLM's blocks: {got[0].cached}")
    rig.check((n := last.number(failed)) > 0, "SGLang was not offered vLLM's blocks, so this shows nothing")
    rig.show("control, pages that SGLang was offered and that were refused", n)
    last.check_calls()
    last.stop()
    rig.show("blocks in one folder, by SGLang, vLLM and kvport's engine", [len(folder.of[name]) for name in ("SGLang", "vLLM", "kvport")])


def by_the_vllm(rig, connector, config, prompts, want, folder):
    """Run prompts on vLLM, which must be offered nothing of another's, and then find its own; then another's in the place of its own."""
    def failed():
        return vllm.log.read_text(encoding="utf-8", errors="replace").count("could not be loaded")

    vllm = VLLM(rig, "vllm", kv=kvport(connector, config), engine={"block_size": BLOCK})
    rig.equal("vLLM", want, [vllm.run(p, TOKENS) for p in prompts])
    rig.check(vllm.external() == 0, f"vLLM took {vllm.external()} tokens of SGLang's")
    vllm.settle(rig.prompts.cut("nudge", 20))
    least = sum(len(p) // BLOCK for p in prompts)
    rig.check((n := folder.wrote("vLLM")) >= least, f"vLLM wrote {n} blocks, want {least}")
    vllm.reset()
    rig.equal("vLLM again", want, [vllm.run(p, TOKENS) for p in prompts])
    rig.check(vllm.external() > 0, "vLLM does not find its own blocks either, so this shows nothing")
    rig.show("tokens of its own that vLLM found", vllm.external())
    rig.check((n := failed()) == 0, f"{n} loads of vLLM failed: it was offered what others wrote")
    vllm.reset()
    folder.plant("SGLang", "vLLM")
    rig.equal("vLLM, SGLang's pages in the place of its blocks", want, [vllm.run(p, TOKENS) for p in prompts])
    rig.check((n := failed()) > 0, "vLLM was not offered SGLang's pages, so this shows nothing")
    rig.show("control, loads of SGLang's pages by vLLM that were refused", n)
    vllm.settle(rig.prompts.cut("nudge", 20))
    vllm.stop()
    folder.of["vLLM"] |= folder.new()  # nudges


def by_kvport_serve(rig, connector, config, prompts, folder):
    """The same with kvport's engine."""
    inner = json.dumps({"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": config})

    def start(name):
        port = free_port()
        return Server(rig, name, [str(ROOT / "bin" / "kvport"), "serve", "--model", str(rig.gguf), "--served-model-name", "m", "--dtype", "f32", "--port",
                                  str(port), "--num-blocks", "256", "--block-size", str(BLOCK), "--kv-transfer-config", inner], port)

    def ask(engine, prompt):
        status, answer = engine.complete(prompt, 8)
        rig.check(status == 200, f"kvport's engine answered {status}: {answer}")
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def failed(engine):
        return int(engine.counter("kvport_failed_loads_total"))

    own, cold = start("serve"), []
    for prompt in prompts:
        text, cached = ask(own, prompt)
        rig.check(cached == 0, f"kvport's engine took {cached} tokens of others")
        cold.append(text)
    rig.check((n := failed(own)) == 0, f"{n} loads of kvport's engine failed: it was offered what others wrote")
    least = sum(len(p) // BLOCK for p in prompts)
    rig.until(lambda: len(folder.new()) >= least, f"{least} files once kvport's engine has stored its blocks")
    own.stop()
    folder.wrote("kvport")
    own = start("serve-again")
    _, cached = ask(own, prompts[0])
    rig.check(cached > 0, "kvport's engine does not find its own blocks either, so this shows nothing")
    rig.show("tokens of its own that kvport's engine found", cached)
    folder.plant("SGLang", "kvport")
    text, cached = ask(own, prompts[1])
    rig.check(text == cold[1] and cached == 0, f"kvport's engine took {cached} tokens of SGLang's: {text!r} is not {cold[1]!r}")
    rig.check((n := failed(own)) > 0, "kvport's engine was not offered SGLang's pages, so this shows nothing")
    rig.show("control, loads of SGLang's pages by kvport's engine that were refused", n)
    own.stop()
    folder.of["kvport"] |= folder.new()  # what it stored again


def salted(rig):
    """Salts are in SGLang's keys: a page of one is not found under another."""
    prompts = [rig.prompts.cut("salted", 300)]
    want = rig.want(prompts)
    engine = rig.options.shared.kvport(rig)
    for salt, hit in ("", False), ("a", False), ("b", False), ("a", True), ("", True):
        got = engine.run(prompts, salt=salt)
        rig.equal(f"salt {salt!r}", want, got)
        rig.check(got[0].cached["storage"] == (full(prompts[0]) if hit else 0), f"salt {salt!r}: {got[0].cached} cached")
        rig.count("hits with a salt that was used before" if hit else "misses with a new salt")
        engine.flush()
    engine.check_calls()


def refused(rig):
    """A mistake in the config ends the start before the model loads."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    bad = extra(connector, config)
    bad["kv_transfer_config"]["kv_connector"] += "s"
    try:
        SGLang(rig, "bad", bad)
    except Failed:
        text = (rig.folder / "bad.log").read_text(encoding="utf-8", errors="replace")
    else:
        raise Failed("an engine with an unknown connector started")
    rig.check(rig.processes[-1].process.wait(30) != 0, "the engine ended as if nothing was wrong")
    rig.check("kv_transfer_config: " in text, "the error does not name the field:\n" + tail(rig.folder / "bad.log"))
    rig.check("Load weight" not in text, "the model was loaded first")
    said = next(t for t in text.splitlines() if "kv_transfer_config: " in t)
    rig.notes.append(said[said.index("kv_transfer_config: "):][:300])
    rig.count("mistakes found before the model loads")


