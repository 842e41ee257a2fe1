// What this connector is about: blocks in the files of one folder, each named by its key in hex.
//
// Rule numbers are those of docs/spec. Keys and files are those of the Go sdk, so plugins in both languages
// can share a folder.

import { createHash, randomUUID } from "node:crypto";
import * as fs from "node:fs";
import { access, mkdir, open, rename, unlink, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { promisify } from "node:util";

import { Failure } from "./failure.mjs";

const read = promisify(fs.read), write = promisify(fs.write);

// Numbers of the protocol's enums.
const SIDE_SCHEDULER = 1, SIDE_WORKER = 2;
const PRODUCER = 1, CONSUMER = 2, BOTH = 3;
const POLICY_ALL = 1;

const KEY_SIZE = 32;

export const SCHEMA = {
  type: "object",
  properties: { dir: { type: "string", description: "Folder of the blocks." } },
  required: ["dir"],
  additionalProperties: false,
};

/** parseConfig gives the folder that a config names. It has no side effects (rules CONF-01, CONF-02). */
export function parseConfig(data) {
  const refuse = (text) => {
    throw new Failure("INCOMPATIBLE", `kv_connector_extra_config: ${text}`);
  };
  let fields;
  try {
    fields = JSON.parse(data.length ? data.toString() : "{}");
  } catch (error) {
    refuse(`bad JSON: ${error.message}`);
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields)) refuse("not an object");
  for (const name of Object.keys(fields)) {
    if (!Object.hasOwn(SCHEMA.properties, name)) refuse(`unknown field "${name}", known is dir`);
  }
  if (typeof fields.dir !== "string" || fields.dir === "") refuse("dir is missing or no path");
  return fields.dir;
}

class Store {
  constructor(dir) {
    this.dir = dir;
  }

  path(key) {
    return join(this.dir, key.toString("hex"));
  }

  /** has reports whether a block is there. A file is whole as soon as it has its name. */
  async has(key) {
    return access(this.path(key)).then(() => true, () => false);
  }

  /** get reads a block of a known size. */
  async get(key, size) {
    const name = key.toString("hex");
    const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = fs.constants; // what lies there may be a link or a pipe
    const file = await open(this.path(key), O_RDONLY | O_NOFOLLOW | O_NONBLOCK).catch((error) => {
      throw new Failure("GONE", `${name} is not stored: ${error.code}`);
    });
    try {
      const found = await file.stat();
      if (!found.isFile()) throw new Failure("GONE", `${name} is no file`);
      if (found.size !== size) throw new Failure("OUTDATED", `${name} has ${found.size} bytes`); // of another version, or cut
      const { bytesRead, buffer } = await file.read(Buffer.allocUnsafe(size), 0, size, 0);
      if (bytesRead !== size) throw new Failure("CORRUPT", `${name} ends too early`);
      return buffer;
    } finally {
      await file.close();
    }
  }

  /** put writes a block under another name first, so that nobody sees half of it (rule WORK-08). */
  async put(key, data) {
    const temporary = join(this.dir, `put-${randomUUID()}`);
    try {
      await writeFile(temporary, data, { flag: "wx", mode: 0o600 });
      await rename(temporary, this.path(key));
    } catch (error) {
      await unlink(temporary).catch(() => {});
      throw error;
    }
  }
}

/**
 * Memory is the cache of one rank. Node.js maps no memory, so blocks are read and written at their place in the
 * inherited descriptor, which is the same memory. A language that can map it should, and look at the seals first.
 */
class Memory {
  constructor(layout, regions) {
    this.regions = regions;
    this.segments = layout.segments;
    this.blockBytes = layout.segments.reduce((sum, s) => sum + s.bytes, 0);
    for (const { fd, size } of regions) {
      const found = fs.fstatSync(fd).size;
      if (found !== size) throw new Failure("INCOMPATIBLE", `descriptor ${fd} has ${found} bytes, want ${size}`);
    }
    for (const s of layout.segments) {
      if (!(s.offset + (layout.blocks - 1) * s.stride + s.bytes <= regions[s.region]?.size)) {
        throw new Failure("INCOMPATIBLE", "the layout reaches beyond its regions");
      }
    }
  }

  /** each moves the parts of a block, one for each segment, wherever they lie (rule LAYOUT-01). */
  async each(block, data, move, what) {
    let at = 0;
    for (const { region, offset, stride, bytes } of this.segments) {
      const result = await move(this.regions[region].fd, data, at, bytes, offset + block * stride);
      if ((result.bytesRead ?? result.bytesWritten) !== bytes) throw new Error(`${what} block ${block}: the cache is shorter than announced`);
      at += bytes;
    }
    return data;
  }

  read(block) {
    return this.each(block, Buffer.allocUnsafe(this.blockBytes), read, "read");
  }

  write(block, data) {
    return this.each(block, data, write, "write");
  }
}

/** checkOpen refuses an Open that cannot be meant (rule LIFE-02). */
function checkOpen(opened) {
  const { side, role, rank, world, engine, layout } = opened;
  const { blocks = 0, groups = [], segments = [] } = layout ?? {};
  const wrong = Object.entries({
    side: ![SIDE_SCHEDULER, SIDE_WORKER].includes(side),
    role: ![PRODUCER, CONSUMER, BOTH].includes(role),
    engine: !engine,
    rank: world < 1 || rank >= world,
    "layout without blocks or segments": blocks < 1 || segments.length === 0,
    "groups, of which this store takes one of full attention": groups.length !== 1 || groups[0].policy !== POLICY_ALL || groups[0].blockTokens < 1,
    segment: segments.some((s) => s.group >= groups.length || s.bytes < 1 || s.stride < s.bytes),
  }).find(([, bad]) => bad);
  if (wrong) throw new Failure("INCOMPATIBLE", `open: bad ${wrong[0]}`);
}

/** openSide makes the side that an Open asks for. */
export async function openSide(opened) {
  checkOpen(opened);
  const side = opened.side === SIDE_WORKER ? new Worker(opened) : new Scheduler(opened);
  await mkdir(side.store.dir, { recursive: true, mode: 0o700 });
  return side;
}

/** Side is what both sides have in common. */
class Side {
  constructor(opened) {
    this.opened = opened;
    this.blockTokens = opened.layout.groups[0].blockTokens;
    this.loads = opened.role !== PRODUCER;
    this.saves = opened.role !== CONSUMER;
    this.store = new Store(parseConfig(opened.config));
  }

  /** key derives the name of one rank's part of a block in one byte layout (rules KEY-05, KEY-07). */
  key(block, rank) {
    const uint64 = (n) => {
      const bytes = Buffer.alloc(8);
      bytes.writeBigUInt64LE(BigInt(n));
      return bytes;
    };
    const hash = createHash("sha256");
    for (const field of [Buffer.from("kvport/store/1"), block, this.opened.shape]) hash.update(uint64(field.length)).update(field);
    for (const n of [0, rank, this.opened.world, 0, 0]) hash.update(uint64(n)); // group 0, all segments
    return hash.digest();
  }

  refuse(kind) {
    throw new Failure("INCOMPATIBLE", `${kind} is not for this side, role or connector`);
  }
}

/** Scheduler says how much of a prompt is stored. It never sees the bytes. */
class Scheduler extends Side {
  async serve(kind, request, call) {
    if (kind !== "match") this.refuse(kind);
    const matches = [];
    for (const query of request.queries) matches.push(await this.match(query, call));
    return { match: { matches } };
  }

  /** match counts the tokens beyond query.computed whose blocks all ranks have stored. It changes nothing (rule SCHED-02). */
  async match(query, call) {
    call.check();
    const keys = this.loads ? keysOf(query.keys) : [];
    let found = Math.floor(query.computed / this.blockTokens);
    while (found < keys.length && (await this.stored(keys[found]))) found++; // a prefix (rules STORE-02, STORE-03)
    const tokens = Math.max(0, found * this.blockTokens - query.computed);
    return { tokens, async: tokens > 0 ? 1 : 0 };
  }

  async stored(block) {
    for (let rank = 0; rank < this.opened.world; rank++) {
      if (!(await this.store.has(this.key(block, rank)))) return false;
    }
    return true;
  }
}

/** Worker moves blocks between the cache of one rank and the store. */
class Worker extends Side {
  constructor(opened) {
    super(opened);
    this.memory = new Memory(opened.layout, opened.regions);
  }

  async serve(kind, request, call) {
    if (kind === "load" && this.loads) await this.each(request.blocks, call, (key, block) => this.load(key, block));
    else if (kind === "save" && this.saves) await this.each(request.blocks, call, (key, block) => this.save(key, block));
    else this.refuse(kind);
    return { moved: {} };
  }

  /** each moves every block, and names those that failed: all others succeeded (rule WORK-02). */
  async each(blocks, call, move) {
    const failed = [];
    let last;
    for (const [key, block] of this.checked(blocks)) {
      try {
        call.check();
        await move(key, block);
      } catch (error) {
        if (!(error instanceof Failure) && !error.syscall) throw error; // a bug
        failed.push(block);
        last = error;
      }
    }
    if (last) throw new Failure(last instanceof Failure ? last.code : "UNSPECIFIED", last.message, failed);
  }

  /** checked gives the blocks of a transfer once it is sure that all lie in the cache (rule INPUT-01). */
  checked(blocks) {
    const keys = keysOf(blocks?.keys ?? []), ids = blocks?.ids ?? [];
    const beyond = ids.find((block) => block < 0 || block >= this.opened.layout.blocks);
    if (beyond !== undefined) throw new Failure("INCOMPATIBLE", `block ${beyond} is not in the cache`);
    if (keys.length !== ids.length || blocks?.groups.some(Boolean)) {
      throw new Failure("INCOMPATIBLE", `${keys.length} keys for ${ids.length} blocks of group 0`);
    }
    return keys.map((key, n) => [key, ids[n]]);
  }

  /** load fills one block. A partial one has no key (rule KEY-04). */
  async load(key, block) {
    if (isPartial(key)) throw new Failure("GONE", "partial blocks are not stored");
    await this.memory.write(block, await this.store.get(this.key(key, this.opened.rank), this.memory.blockBytes));
  }

  /** save stores one block, unless it is partial. */
  async save(key, block) {
    if (!isPartial(key)) await this.store.put(this.key(key, this.opened.rank), await this.memory.read(block));
  }
}

/** keysOf cuts a column of keys into keys. */
function keysOf(column) {
  return Array.from({ length: Math.ceil(column.length / KEY_SIZE) }, (_, n) => column.subarray(n * KEY_SIZE, (n + 1) * KEY_SIZE));
}

function isPartial(key) {
  return key.every((byte) => byte === 0);
}
