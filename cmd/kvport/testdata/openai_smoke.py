"""Talks to kvport serve as programs do that use OpenAI's Python client.

Arguments: the base URL, which ends in /v1, and a file with an API key. The model must be sim.
"""

import asyncio
import json
import pathlib
import sys

import openai

URL, KEY = sys.argv[1], pathlib.Path(sys.argv[2]).read_text(encoding="ascii").strip()
MODEL, PROMPT = "sim", "One two three four five six seven eight nine ten eleven twelve. "
GREEDY = {"model": MODEL, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "Answer shortly."}, {"role": "user", "content": "What is a KV cache?"}]


def models(client):
    """List and retrieve."""
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def completions(client):
    """Whole, streamed, from tokens, several prompts, seeded, stopped."""
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    assert whole.object == "text_completion" and whole.model == MODEL
    assert whole.usage.completion_tokens == 12 and whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    text, usage, reason = "", None, None
    for chunk in client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text, reason = text + choice.text, choice.finish_reason or reason
    assert text == whole.choices[0].text and reason == whole.choices[0].finish_reason == "length"
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens_details.cached_tokens > 0, "the second request's prefix is cached"

    body = GREEDY["extra_body"] | {"return_token_ids": True}
    two = client.completions.create(prompt=[PROMPT, "Another prompt"], **GREEDY | {"extra_body": body})
    assert [c.index for c in two.choices] == [0, 1] and two.choices[0].text == text
    ids = two.choices[0].token_ids
    assert len(ids) == 12 and all(isinstance(i, int) for i in ids)
    assert client.completions.create(prompt=list(PROMPT.encode()), **GREEDY).choices[0].text, "tokens as prompt"

    seeded = [client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1.5, top_p=0.9, seed=s).choices[0].text for s in (7, 7, 8)]
    assert seeded[0] == seeded[1] != seeded[2]
    part = next(c for c in text[2:] if c.isprintable())
    stopped = client.completions.create(prompt=PROMPT, stop=[part], **GREEDY).choices[0]
    assert stopped.finish_reason == "stop" and text.startswith(stopped.text) and part not in stopped.text


def chat(client):
    """Whole, streamed, and a stream that the client leaves."""
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    content, role = "", None
    with client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            content += chunk.choices[0].delta.content or ""
            role = chunk.choices[0].delta.role or role
    assert content == whole.choices[0].message.content and role == "assistant"
    limited = {k: v for k, v in GREEDY.items() if k != "max_tokens"}
    short = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=3, **limited)
    assert short.usage.completion_tokens == 3
    with client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY | {"max_tokens": 2000}) as stream:
        next(iter(stream))
    assert client.with_options(timeout=20).chat.completions.create(messages=MESSAGES, **GREEDY).usage.completion_tokens == 12


def errors(client):
    """What is wrong arrives as the client's own kind of error, with its field."""
    def fails(kind, param, call, **arguments):
        try:
            call(**arguments)
        except kind as err:
            assert err.param == param and err.code and err.message, (err.param, err.code, err.message)
            return
        raise AssertionError(f"no {kind.__name__} for {arguments}")

    complete = client.completions.create
    fails(openai.BadRequestError, "max_tokens", complete, prompt=PROMPT, **GREEDY | {"max_tokens": -1})
    fails(openai.BadRequestError, "temperature", complete, prompt=PROMPT, **GREEDY | {"temperature": -1})
    fails(openai.BadRequestError, "n", complete, prompt=PROMPT, n=2, **GREEDY)
    fails(openai.BadRequestError, "prompt", complete, prompt="x" * 1_000_000, **GREEDY)
    fails(openai.BadRequestError, "tools", client.chat.completions.create, messages=MESSAGES, tools=[{"type": "function"}], **GREEDY)
    fails(openai.NotFoundError, "model", complete, prompt=PROMPT, **GREEDY | {"model": "gpt-4"})
    fails(openai.AuthenticationError, None, client.with_options(api_key="wrong").models.list)


async def together():
    """Requests at the same time give the tokens of one alone."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        alone = await client.completions.create(prompt=PROMPT, **GREEDY)
        answers = await asyncio.gather(*(client.completions.create(prompt=PROMPT, **GREEDY) for _ in range(8)))
        assert {a.choices[0].text for a in answers} == {alone.choices[0].text}


def main():
    """Run everything and say so."""
    steps = [models, completions, chat, errors]
    with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60) as client:
        for step in steps:
            step(client)
    asyncio.run(together())
    print(json.dumps({"openai": openai.__version__, "steps": [s.__name__ for s in [*steps, together]]}))


if __name__ == "__main__":
    main()
