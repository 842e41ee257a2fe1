"""A kvport connector in Python: KV blocks as files in one folder.

It speaks the plugin protocol without an SDK, so it shows what a plugin in any language has to do:
the handshake, the messages, the shared memory and the rules that go with them. It needs grpcio,
protobuf and cryptography. docs/other-languages.md walks through it; the rule numbers are those of
docs/spec.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import faulthandler
import fcntl
import hashlib
import json
import logging
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc import aio

NAME = "PyStoreConnector"
VERSION = "1.0.0"
COOKIE = "b1f0e4a6c7d94b0f9b7e6f4a5d3c2810"  # KVPORT_PLUGIN: a host started us
PROTOCOL = 1
KEY_SIZE = 32
MAX_MESSAGE = 16 << 20  # bytes
MAX_CALLS = 1024  # that run at once in one session
MAX_TEXT = 4 << 10  # bytes of an error's message

log = logging.getLogger("pystore")

# --- Messages: classes made of the descriptor that the repository pins ---------------------------

PROTO = Path(__file__).resolve().parents[2] / "proto" / "kvport" / "v1" / "v1.binpb"


def load_messages(path: Path) -> dict[str, Any]:
    """Make a class of each message in a file descriptor set, by its name without the package."""
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file
    for file in files:
        pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([f.name for f in files], pool)
    return {name.removeprefix("kvport.v1."): made for name, made in classes.items()}


MESSAGES = load_messages(PROTO)


class Failure(Exception):
    """An error that the engine can act on: its code says how, and blocks what it is limited to."""

    def __init__(self, code: str, text: str, blocks: list[int] | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.blocks = blocks or []

    def message(self) -> Any:
        """Give the error as the wire carries it."""
        text = str(self).encode(errors="replace")[:MAX_TEXT].decode(errors="ignore")
        return MESSAGES["Error"](code="ERROR_CODE_" + self.code, message=text, blocks=self.blocks)


class Call:
    """The context of one call: it is done when it was cancelled or its deadline has passed."""

    def __init__(self, timeout_us: int) -> None:
        self.cancelled = False
        self.deadline = time.monotonic() + timeout_us / 1e6 if timeout_us else float("inf")

    def check(self) -> None:
        """Raise if the engine waits no longer (rule WORK-07)."""
        if self.cancelled:
            raise Failure("CANCELED", "the engine cancelled the call")
        if time.monotonic() > self.deadline:
            raise Failure("DEADLINE", "the deadline of the call has passed")


# --- Memory: the paged cache of the engine, in place ---------------------------------------------

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_region(fd: int, size: int) -> mmap.mmap:
    """Map a descriptor that we inherited, if it is what was announced.

    Without the seals the other end could shrink the file, and our next access would kill us.
    """
    try:
        seals, found = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
    except OSError as err:
        raise Failure("INCOMPATIBLE", f"fd {fd} is no shared memory: {err}") from None
    if seals & SEALS != SEALS or found != size:
        raise Failure("INCOMPATIBLE", f"fd {fd}: seals {seals:#x}, {found} bytes, want {size}")
    os.set_inheritable(fd, False)  # no child of ours may hold the cache
    return mmap.mmap(fd, size)  # shared, to read and to write


class Memory:
    """The cache of one rank: its regions, mapped, and where each block lies in them."""

    def __init__(self, layout: Any, regions: Any) -> None:
        self.segments = [(s.region, s.offset, s.block_stride, s.bytes) for s in layout.segments]
        with contextlib.ExitStack() as opened:
            maps = [opened.enter_context(map_region(r.fd, r.size)) for r in regions]
            self.views = [opened.enter_context(memoryview(m)) for m in maps]
            for region, offset, stride, size in self.segments:
                if region >= len(maps) or offset + (layout.blocks - 1) * stride + size > len(maps[region]):
                    raise Failure("INCOMPATIBLE", "the layout reaches beyond its regions")
            self.opened = opened.pop_all()

    def spans(self, block: int) -> list[memoryview]:
        """Give the parts of a block, one for each segment, wherever they lie (rule LAYOUT-01)."""
        starts = [(region, offset + block * stride, size) for region, offset, stride, size in self.segments]
        return [self.views[region][start : start + size] for region, start, size in starts]

    def close(self) -> None:
        """Unmap everything. No span may be in use."""
        self.opened.close()


# --- Store: what this connector is about ---------------------------------------------------------


def open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, as the open of a pipe that lies there would."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


class Store:
    """Blocks in the files of one folder, each named by its key in hex."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"dir": {"type": "string", "description": "Folder of the blocks."}},
        "required": ["dir"],
        "additionalProperties": False,
    }

    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.makedirs(directory, mode=0o700, exist_ok=True)

    @staticmethod
    def parse(config: bytes) -> str:
        """Read a config strictly (rule CONF-01). This has no side effects (rule CONF-02)."""
        try:
            fields = json.loads(config or b"{}")
        except ValueError as err:
            raise Failure("INCOMPATIBLE", f"kv_connector_extra_config: bad JSON: {err}") from None
        if not isinstance(fields, dict):
            raise Failure("INCOMPATIBLE", "kv_connector_extra_config: not an object")
        for name in fields.keys() - Store.schema["properties"].keys():
            raise Failure("INCOMPATIBLE", f'kv_connector_extra_config: unknown field "{name}", known is dir')
        directory = fields.get("dir")
        if not isinstance(directory, str) or not directory:
            raise Failure("INCOMPATIBLE", "kv_connector_extra_config: dir is missing or no path")
        return directory

    def path(self, key: bytes) -> str:
        """Name the file of a key."""
        return os.path.join(self.directory, key.hex())

    def has(self, key: bytes) -> bool:
        """Report whether a block is there. A file is whole as soon as it has its name."""
        return os.path.exists(self.path(key))

    def get(self, key: bytes, spans: list[memoryview]) -> None:
        """Read a block into the cache."""
        try:
            file = open(self.path(key), "rb", opener=open_at_once)
        except OSError as err:
            raise Failure("GONE", f"{key.hex()} is not stored: {err.strerror}") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size != sum(map(len, spans)):  # another version of kvport has stored it, or it was cut
                raise Failure("OUTDATED", f"{key.hex()} has {size} bytes")
            if any(file.readinto(s) != len(s) for s in spans):
                raise Failure("CORRUPT", f"{key.hex()} ends too early")

    def put(self, key: bytes, spans: list[memoryview]) -> None:
        """Write a block under another name first, so that nobody sees half of it (rule WORK-08)."""
        fd, name = tempfile.mkstemp(prefix="put-", dir=self.directory)
        try:
            with open(fd, "wb") as file:
                file.writelines(spans)
            os.replace(name, self.path(key))
        except BaseException:
            os.unlink(name)
            raise


# --- Sides: one session is one side of one engine rank -------------------------------------------


def check_open(opened: Any) -> None:
    """Refuse an Open that cannot be meant (rule LIFE-02)."""
    layout = opened.layout
    wrong = {
        "side": opened.side not in (1, 2),  # SIDE_SCHEDULER, SIDE_WORKER
        "role": opened.role not in (1, 2, 3),  # ROLE_PRODUCER, ROLE_CONSUMER, ROLE_BOTH
        "engine": not opened.engine,
        "rank": opened.rank >= opened.world,
        "layout without blocks or segments": not layout.blocks or not layout.segments,
        "group": any(g.block_tokens < 1 for g in layout.groups),
        "segment": any(
            s.group >= len(layout.groups) or s.bytes < 1 or s.block_stride < s.bytes for s in layout.segments
        ),
    }
    for what, bad in wrong.items():
        if bad:
            raise Failure("INCOMPATIBLE", f"open: bad {what}")


class Side:
    """What both sides have in common: the engine's description and the store."""

    def __init__(self, opened: Any) -> None:
        check_open(opened)
        groups = opened.layout.groups
        if len(groups) != 1 or groups[0].policy != 1:  # POLICY_ALL
            raise Failure("INCOMPATIBLE", f"{len(groups)} groups, want one of full attention")
        self.block_tokens: int = groups[0].block_tokens
        self.blocks: int = opened.layout.blocks
        self.rank: int = opened.rank
        self.world: int = opened.world
        self.shape: bytes = opened.shape
        self.loads: bool = opened.role != 1  # ROLE_PRODUCER
        self.saves: bool = opened.role != 2  # ROLE_CONSUMER
        self.store = Store(Store.parse(opened.config))

    def key(self, block: bytes, rank: int) -> bytes:
        """Derive the name of one rank's part of a block in one byte layout (rules KEY-05, KEY-07)."""
        digest = hashlib.sha256()
        for field in (b"kvport/store/1", block, self.shape):
            digest.update(struct.pack("<Q", len(field)) + field)
        digest.update(struct.pack("<5Q", 0, rank, self.world, 0, 0))  # group 0, all segments
        return digest.digest()

    def answer(self, call: Call, request: Any) -> Any:
        """Answer one call. It runs on a thread of its own."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the side holds. No call is running."""


class Scheduler(Side):
    """Says how much of a prompt is stored. It never sees the bytes."""

    def answer(self, call: Call, request: Any) -> Any:
        """Serve Match, the only call of a scheduler side without optional powers."""
        if request.WhichOneof("call") != "match":
            raise Failure("INCOMPATIBLE", f"{request.WhichOneof('call')} is not offered")
        matches = [self.match(call, query) for query in request.match.queries]
        return MESSAGES["SessionResponse"](match=MESSAGES["MatchResponse"](matches=matches))

    def match(self, call: Call, query: Any) -> Any:
        """Count the tokens beyond query.computed whose blocks all ranks have stored."""
        call.check()
        first = found = query.computed // self.block_tokens
        for key in keys_of(query.keys)[first:] if self.loads else []:
            if not all(self.store.has(self.key(key, rank)) for rank in range(self.world)):
                break  # a match is a prefix (rules STORE-02, STORE-03)
            found += 1
        tokens = found * self.block_tokens - query.computed
        return MESSAGES["Match"](tokens=max(0, tokens), **{"async": tokens > 0})


class Worker(Side):
    """Moves blocks between the cache of one rank and the store."""

    def __init__(self, opened: Any) -> None:
        super().__init__(opened)
        self.memory = Memory(opened.layout, opened.regions)

    def close(self) -> None:
        """Unmap the cache."""
        self.memory.close()

    def answer(self, call: Call, request: Any) -> Any:
        """Serve Load and Save."""
        match request.WhichOneof("call"):
            case "load" if self.loads:
                self.each(call, request.load.blocks, self.load)
            case "save" if self.saves:
                self.each(call, request.save.blocks, self.save)
            case kind:
                raise Failure("INCOMPATIBLE", f"{kind} is not for this side and role")
        return MESSAGES["SessionResponse"](moved=MESSAGES["Moved"]())

    def each(self, call: Call, blocks: Any, move: Callable[[bytes, int], None]) -> None:
        """Move each block, and name those that failed: all others succeeded (rule WORK-02)."""
        failed: list[int] = []
        code = text = ""
        for key, block in self.checked(blocks):
            try:
                call.check()
                move(key, block)
            except (Failure, OSError) as err:
                failed.append(block)
                code, text = err.code if isinstance(err, Failure) else "UNSPECIFIED", str(err)
        if failed:
            raise Failure(code, text, failed)

    def checked(self, blocks: Any) -> list[tuple[bytes, int]]:
        """Give the blocks of a transfer once it is sure that all lie in the cache."""
        keys = keys_of(blocks.keys)
        if len(keys) != len(blocks.ids) or any(blocks.groups):
            raise Failure("INCOMPATIBLE", f"{len(keys)} keys for {len(blocks.ids)} blocks of group 0")
        for block in blocks.ids:
            if not 0 <= block < self.blocks:
                raise Failure("INCOMPATIBLE", f"block {block} is not in the cache")
        return list(zip(keys, blocks.ids, strict=True))

    def load(self, key: bytes, block: int) -> None:
        """Fill one block. A partial one has no key (rule KEY-04)."""
        if not any(key):
            raise Failure("GONE", "partial blocks are not stored")
        self.store.get(self.key(key, self.rank), self.memory.spans(block))

    def save(self, key: bytes, block: int) -> None:
        """Store one block, unless it is partial."""
        if any(key):
            self.store.put(self.key(key, self.rank), self.memory.spans(block))


def keys_of(column: bytes) -> list[bytes]:
    """Cut a column of keys into keys."""
    return [column[at : at + KEY_SIZE] for at in range(0, len(column), KEY_SIZE)]


# --- Sessions: calls on one stream, answered in any order ----------------------------------------


class Session:
    """One stream. Reading it never waits for a call; each call runs on a thread of the pool."""

    def __init__(self, plugin: Plugin, stream: Any) -> None:
        self.plugin = plugin
        self.stream = stream
        self.side: Side | None = None
        self.calls: dict[int, Call] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.sending = asyncio.Lock()

    async def run(self, requests: AsyncIterator[Any]) -> None:
        """Serve until Close or the end of the stream. Calls end first, then the side, then Close."""
        closing = None
        try:
            async for request in requests:
                if request.WhichOneof("call") == "close":
                    closing = request
                    break
                await self.accept(request)
        finally:
            await self.drain()
        if closing:
            await self.send(closing.id, MESSAGES["SessionResponse"](closed=MESSAGES["Closed"]()))

    async def accept(self, request: Any) -> None:
        """Start one call. A peer that breaks the protocol loses the stream."""
        kind = request.WhichOneof("call")
        if kind == "cancel":
            if call := self.calls.get(request.cancel.call):
                call.cancelled = True  # it answers all the same
            return
        if kind is None or not request.id or request.id in self.calls or (kind == "open") == bool(self.side):
            await self.stream.abort(grpc.StatusCode.INVALID_ARGUMENT, f"call {request.id}: unexpected {kind}")
        if len(self.calls) >= MAX_CALLS:
            await self.send(request.id, failed(Failure("BUSY", f"{MAX_CALLS} calls are running")))
            return
        self.calls[request.id] = Call(request.timeout_us)
        task = asyncio.create_task(self.serve(request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if kind == "open":
            await asyncio.wait({task})  # nothing else can run before

    async def serve(self, request: Any) -> None:
        """Run one call and answer it, once."""
        call = self.calls[request.id]
        answer = await asyncio.get_running_loop().run_in_executor(
            self.plugin.pool, self.plugin.guard, self.dispatch, call, request
        )
        del self.calls[request.id]
        await self.send(request.id, answer)

    def dispatch(self, call: Call, request: Any) -> Any:
        """Open the side, or let it answer. This runs on a thread."""
        call.check()
        if self.side:
            return self.side.answer(call, request)
        self.side = Worker(request.open) if request.open.side == 2 else Scheduler(request.open)
        return MESSAGES["SessionResponse"](opened=MESSAGES["Opened"]())

    async def send(self, request: int, answer: Any) -> None:
        """Write one answer. When the stream is over nobody waits for it."""
        answer.id = request
        async with self.sending:
            with contextlib.suppress(aio.BaseError, asyncio.InvalidStateError):
                await self.stream.write(answer)

    async def drain(self) -> None:
        """Wait until no call touches the memory any more (rule WORK-04), then free it."""
        for call in self.calls.values():
            call.cancelled = True
        while self.tasks:
            await asyncio.wait(self.tasks)
        if self.side:
            self.side.close()


def failed(failure: Failure) -> Any:
    """Make the answer of a call that failed."""
    return MESSAGES["SessionResponse"](error=failure.message())


# --- Plugin: the gRPC services -------------------------------------------------------------------


class Plugin:
    """The services that a host calls: kvport.v1.Plugin, and one method of go-plugin's own."""

    def __init__(self) -> None:
        self.panics = 0
        self.stopped = asyncio.Event()
        self.pool = ThreadPoolExecutor(32, thread_name_prefix="call")

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run a call and make an answer of whatever it raises: a bug must not take the process."""
        try:
            return work(*args)
        except Failure as err:
            return failed(err)
        except OSError as err:
            return failed(Failure("UNSPECIFIED", str(err)))
        except Exception as err:
            log.exception("call failed")
            self.panics += 1
            return failed(Failure("PANIC", repr(err)))

    async def describe(self, request: Any, _: Any) -> Any:
        """Check a config and say what the connector would do with it."""
        try:
            Store.parse(request.config)
        except Failure as err:
            return MESSAGES["DescribeResponse"](error=err.message())
        return MESSAGES["DescribeResponse"](name=NAME, scope="SCOPE_SHARED")

    async def heartbeat(self, request: Any, _: Any) -> Any:
        """Answer at once: the event loop never waits for a call."""
        return MESSAGES["HeartbeatResponse"](sequence=request.sequence, panics=self.panics)

    async def session(self, requests: AsyncIterator[Any], stream: Any) -> None:
        """Serve one side of one engine rank."""
        await Session(self, stream).run(requests)

    async def shutdown(self, _: bytes, __: Any) -> bytes:
        """End the process. This is the only call of go-plugin's that a plugin must serve."""
        self.stopped.set()
        return b""  # plugin.Empty

    def handlers(self) -> Iterator[Any]:
        """List the services with their methods."""

        def coded(answer: str, request: str) -> dict[str, Any]:
            decode, encode = MESSAGES[request].FromString, MESSAGES[answer].SerializeToString
            return {"request_deserializer": decode, "response_serializer": encode}

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods = {
            "Describe": unary(self.describe, **coded("DescribeResponse", "DescribeRequest")),
            "Heartbeat": unary(self.heartbeat, **coded("HeartbeatResponse", "HeartbeatRequest")),
            "Session": stream(self.session, **coded("SessionResponse", "SessionRequest")),
        }
        yield grpc.method_handlers_generic_handler("kvport.v1.Plugin", methods)
        control = {"Shutdown": unary(self.shutdown)}
        yield grpc.method_handlers_generic_handler("plugin.GRPCController", control)


# --- Handshake: how a host meets us --------------------------------------------------------------


def make_certificate() -> tuple[bytes, bytes, bytes]:
    """Make a key and a certificate for this process: key and certificate in PEM, the latter in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=30 * 365))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem, der = serialization.Encoding.PEM, serialization.Encoding.DER
    return key.private_bytes(pem, form, plain), certificate.public_bytes(pem), certificate.public_bytes(der)


async def serve() -> None:
    """Listen, tell the host where and with which certificate, and serve until it says stop."""
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the engine, which stops us when it has drained
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)  # say where we hang, and end
    asyncio.get_running_loop().add_reader(os.pidfd_open(os.getppid()), os._exit, 1)  # no host, no plugin
    size = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", MAX_MESSAGE)]
    server, plugin = aio.server(options=size), Plugin()
    server.add_generic_rpc_handlers(tuple(plugin.handlers()))
    key, pem, der = make_certificate()
    trusted = os.environ["PLUGIN_CLIENT_CERT"].encode()
    credentials = grpc.ssl_server_credentials([(key, pem)], trusted, require_client_auth=True)
    socket = os.path.join(os.environ["PLUGIN_UNIX_SOCKET_DIR"], "plugin")
    server.add_secure_port("unix:" + socket, credentials)
    await server.start()
    certificate = base64.b64encode(der).decode().rstrip("=")
    print(f"1|{PROTOCOL}|unix|{socket}|grpc|{certificate}", flush=True)
    await plugin.stopped.wait()
    await server.stop(grace=1)
    os._exit(0)  # threads of grpc now and then keep the interpreter from ending


class HostFormat(logging.Formatter):
    """Log lines as JSON, as the host reads them from stderr."""

    def format(self, record: logging.LogRecord) -> str:
        """Make one line of a record."""
        level = {"WARNING": "warn", "CRITICAL": "error"}.get(record.levelname, record.levelname.lower())
        return json.dumps({"@level": level, "@message": super().format(record)})


def manifest() -> dict[str, Any]:
    """Say what a host must know before it starts us."""
    return {
        "name": NAME,
        "aliases": [],
        "version": VERSION,
        "protocol_versions": [PROTOCOL],
        "capabilities": [],
        "environment": [],  # variables that we want to see; hosts pass no others
        "needs": {"writes": ["dir"]},  # fields of our config with paths, for hosts with a sandbox
        "scope": "shared",
        "config_schema": Store.schema,
    }


def main() -> int:
    """Serve the host that started us, or tell a person what this is."""
    if os.environ.get("KVPORT_PLUGIN") == COOKIE and len(sys.argv) == 1:
        handler = logging.StreamHandler()
        handler.setFormatter(HostFormat())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        try:
            asyncio.run(serve())
        except BaseException:
            log.exception("it cannot serve")
        os._exit(1)  # threads of grpc may keep the interpreter from ending
    parser = argparse.ArgumentParser(description=f"{NAME}, a kvport plugin: an engine starts it.")
    parser.add_argument("--manifest", action="store_true", help="print what it can do, as JSON")
    parser.add_argument("--config", help="with --manifest: a config to check")
    parser.add_argument("--version", action="version", version=f"{NAME} {VERSION} (protocol {PROTOCOL})")
    args = parser.parse_args()
    if not args.manifest:
        parser.print_usage(sys.stderr)
        return 2
    try:
        if args.config:
            Store.parse(args.config.encode())
    except Failure as err:
        print(err, file=sys.stderr)
        return 2
    print(json.dumps(manifest(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
