"""Lines about equal tokens: every way of a page, and pages that are not ours."""

import json
import shutil

from connectors import storage
from faults import find, spoil
from rig import ROOT, Failed, Server, free_port, kvport, tail
from rig import Engine as VLLM
from served import LAYOUTS, PAGE, SGLang, check_cached, extra, full, stored

FILE = {"hicache_storage_backend": "file"}  # SGLang's own
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
    engine.quiet()
    engine.flush()
    got = engine.run(prompts)
    rig.equal(f"{label}, from the store", want, got)
    check_cached(rig, label, got, prompts, "storage")


def equal(rig):
    """All ways of a page, each connector and layout; then in a new engine, which goes on with a longer prompt."""
    prompts = rig.prompts.set("ways", [297, 500])
    want = rig.want(prompts)
    turn = [p + list(w.ids) + rig.prompts.cut("turn", 24) for p, w in zip(prompts, want, strict=True)]
    want2 = rig.want(turn)
    cases = [(setup.label, setup, config, "page_first", {}) for setup, config in stored(rig)]
    typical, _, config = storage(rig, rig.folder / "layouts")
    for setup in [s for label, s, *_ in cases if label == typical]:
        cases += [(f"{typical}, {layout}", setup, config, layout, {}) for layout in list(LAYOUTS)[1:]]
        cases += [(f"{typical}, tensors", setup, config, "layer_first", {"interface_v1": 0})]
    for label, setup, config, layout, more in cases:
        name = label.replace(" ", "-").replace(",", "")
        kept = extra(setup.connector, config, **more)
        engine = SGLang(rig, name, kept, layout, max_total_tokens=SMALL)
        ways(rig, label, engine, prompts, want)
        engine.quiet()
        engine.stop()
        if setup.shared:
            engine = SGLang(rig, name + "-new", kept, layout)
            got = engine.run(turn)
            rig.equal(f"{label}, a new engine", want2, got)
            check_cached(rig, f"{label}, a new engine", got, prompts, "storage")
            engine.stop()
            rig.count("new engines")
        rig.count("ways to keep pages")
        rig.say(f"{label} holds")


def damaged(rig):
    """A hundred damaged pages; the same damage under SGLang's own backend, to see that it matters."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    prompts = rig.prompts.set("damaged", [545, 560, 575])  # 34 or 35 whole pages each
    want = rig.want(prompts)
    engine = SGLang(rig, "kvport", extra(connector, config))
    rig.equal("cold", want, engine.run(prompts))
    engine.quiet()
    engine.flush()
    files = sorted(find(rig.folder / "blocks"))
    # Pages that are filled while an answer is made are stored too, and a prompt never asks for its own: spoil all.
    for path in files:
        spoil(path)
    pages = sum(full(p) // 16 for p in prompts)
    rig.check(pages >= 100, f"only {pages} pages")
    got = engine.run(prompts)
    rig.equal("damaged", want, got)
    rig.check(not any(r.cached["storage"] for r in got), f"damaged pages were taken: {[r.cached for r in got]}")
    rig.until(lambda: engine.number("kvport_integrity_failures_total") >= pages, f"{pages} damaged pages counted, "
              f"{engine.number('kvport_integrity_failures_total')} are", 20)
    rig.show("damaged pages that were asked for", pages)
    rig.show("counted as damaged", engine.number("kvport_integrity_failures_total"))
    engine.quiet()
    engine.flush()
    got = engine.run(prompts)
    rig.equal("mended", want, got)
    check_cached(rig, "mended", got, prompts, "storage")
    engine.stop()
    own = SGLang(rig, "file", None, env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(rig.folder / "own")}, **FILE,
                 hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 16}))
    rig.equal("file, cold", want, own.run(prompts))
    own.quiet()
    own.flush()
    for path in (rig.folder / "own").rglob("*"):
        if path.is_file():
            with open(path, "r+b") as f:
                f.seek(100_000)
                old = f.read(4096)
                f.seek(100_000)
                f.write(bytes(255 - b for b in old))
    got = own.run(prompts)
    wrong = sum(list(w.ids) != list(g.ids) for w, g in zip(want, got, strict=True))
    rig.check(wrong > 0, "the damage changes nothing under SGLang's own backend either, so it shows nothing")
    rig.show("wrong answers of SGLang's own backend after such damage", f"{wrong} of {len(prompts)}")
    own.stop()


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
    """Engines of another layout, page size, dtype and model on the same folder find nothing, and then their own."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    kept = extra(connector, config)
    prompts = [rig.prompts.cut("others", 400)]
    want = rig.want(prompts)
    model = other_weights(rig)
    cases = {
        "first": ({}, want),
        "layout": ({"layout": "page_first_direct"}, want),
        "page size": ({"page_size": 32}, want),
        "dtype": ({"dtype": "bfloat16"}, None),  # which transformers rounds in another order
        "model": ({"model_path": str(model)}, rig.want(prompts, model=model)),
    }
    asked = set()
    for name, (more, answers) in cases.items():
        engine = SGLang(rig, name.replace(" ", "-"), kept, **more)
        cold = engine.run(prompts)
        rig.check(cold[0].cached["storage"] == 0, f"{name}: pages of another engine were taken: {cold[0].cached}")
        if answers:
            rig.equal(f"another {name}", answers, cold)
        asked.add(engine.calls("batch_exists")[0]["first"])
        engine.quiet()
        engine.flush()
        warm = engine.run(prompts)
        rig.equal(f"another {name}, its own pages", cold, warm)
        check_cached(rig, name, warm, prompts, "storage", more.get("page_size", 16))
        engine.quiet()
        engine.stop()
        rig.count("engines on one folder, none of which took another's page")
    rig.check(len(asked) == 2, f"SGLang's own keys differ: {len(asked)} of {len(cases)}, so this shows nothing")
    rig.show("different first keys that SGLang asked for", len(asked))


def engines(rig):
    """vLLM, kvport's engine and SGLang on one folder: none finds what another wrote."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    ours, theirs = [rig.prompts.cut("of SGLang", 300)], [rig.prompts.cut("of the others", 300)]
    want_ours, want_theirs = rig.want(ours), rig.want(theirs)
    first = SGLang(rig, "first", extra(connector, config))
    rig.equal("SGLang", want_ours, first.run(ours))
    first.quiet()
    first.stop()
    written = len(find(rig.folder / "blocks"))
    vllm = VLLM(rig, "vllm", kv=kvport(connector, config), engine={"block_size": 16})
    rig.equal("vLLM", want_ours + want_theirs, [vllm.run(p, 16) for p in ours + theirs])
    rig.check(vllm.external() == 0, f"vLLM took {vllm.external()} tokens of SGLang's")
    vllm.settle(rig.prompts.cut("nudge", 20))
    vllm.stop()
    by_vllm = len(find(rig.folder / "blocks")) - written
    inner = json.dumps({"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": config})
    port = free_port()
    own = Server(rig, "serve", [str(ROOT / "bin" / "kvport"), "serve", "--model", str(rig.gguf), "--served-model-name", "m", "--dtype", "f32", "--port",
                                str(port), "--num-blocks", "256", "--kv-transfer-config", inner], port)
    for prompt in ours + theirs:
        status, answer = own.complete(prompt, 8)
        cached = (answer.get("usage", {}).get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        rig.check(status == 200 and cached == 0, f"kvport's engine took {cached} tokens of others: {answer}")
    by_serve = rig.until(lambda: max(0, len(find(rig.folder / "blocks")) - written - by_vllm - 35), "blocks of kvport's engine") + 35
    own.stop()
    last = SGLang(rig, "last", extra(connector, config))
    got = last.run(theirs)
    rig.equal("SGLang afterwards", want_theirs, got)
    rig.check(got[0].cached["storage"] == 0, f"SGLang took what others wrote: {got[0].cached}")
    got = last.run(ours)
    rig.equal("SGLang afterwards", want_ours, got)
    check_cached(rig, "SGLang's own pages", got, ours, "storage")
    last.stop()
    rig.show("blocks in one folder, by SGLang, vLLM and kvport's engine", [written, by_vllm, by_serve])


def salted(rig):
    """Salts are in SGLang's keys: a page of one is not found under another."""
    _, connector, config = storage(rig, rig.folder / "blocks")
    prompts = [rig.prompts.cut("salted", 300)]
    want = rig.want(prompts)
    engine = SGLang(rig, "salts", extra(connector, config))
    for salt, hit in ("", False), ("a", False), ("b", False), ("a", True), ("", True):
        got = engine.run(prompts, salt=salt)
        rig.equal(f"salt {salt!r}", want, got)
        rig.check((got[0].cached["storage"] > 0) == hit, f"salt {salt!r}: {got[0].cached} cached")
        rig.count("hits with a salt that was used before" if hit else "misses with a new salt")
        engine.quiet()
        engine.flush()
    engine.stop()


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
    rig.check("kv_transfer_config: " in text, "the error does not name the field:\n" + tail(rig.folder / "bad.log"))
    rig.check("Load weight" not in text, "the model was loaded first")
    said = next(t for t in text.splitlines() if "kv_transfer_config: " in t)
    rig.notes.append(said[said.index("kv_transfer_config: "):][:300])
    rig.count("mistakes found before the model loads")


