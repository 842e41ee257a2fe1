// Protobuf: the messages of proto/kvport/v1/plugin.proto that a store needs, and their encoding.
//
// A message is a list of fields, each a tag (number and wire type) and a value. A reader skips what its
// table does not have, so a plugin goes on working when protocol 1 grows. docs/protocol.md says what may be added.

// Each table says: field number: [name, type]. A type is a scalar, the name of another table, or either with
// a star for a repeated field. "uint" becomes a Number; "id" stays a BigInt, because it must come back exactly.
const MESSAGES = {
  DescribeRequest: { 1: ["config", "bytes"] },
  DescribeResponse: { 1: ["error", "Error"], 2: ["name", "string"], 6: ["scope", "uint"] },
  HeartbeatRequest: { 1: ["sequence", "id"] },
  HeartbeatResponse: { 1: ["sequence", "id"], 2: ["panics", "uint"] },
  Error: { 1: ["code", "uint"], 2: ["message", "string"], 3: ["blocks", "int*"] },

  // One of the fields from 3 on is set: the call. The calls of powers that this plugin does not have are
  // here too, so that it can refuse them by name.
  SessionRequest: {
    1: ["id", "id"], 2: ["timeoutUs", "uint"],
    3: ["open", "Open"], 4: ["match", "MatchRequest"], 6: ["load", "Transfer"], 7: ["save", "Transfer"],
    11: ["cancel", "Cancel"], 12: ["close", "Empty"],
    5: ["plan", "Empty"], 8: ["finish", "Empty"], 9: ["consumed", "Empty"], 10: ["reset", "Empty"],
    13: ["stats", "Empty"], 14: ["events", "Empty"], 15: ["saveLayers", "Empty"], 16: ["renewals", "Empty"],
    17: ["reshape", "Empty"], 18: ["reshapeBlocks", "Empty"],
  },
  SessionResponse: {
    1: ["id", "id"], 2: ["error", "Error"],
    3: ["opened", "Empty"], 4: ["match", "MatchResponse"], 6: ["moved", "Empty"], 10: ["closed", "Empty"],
  },

  Open: {
    1: ["side", "uint"], 2: ["engine", "string"], 4: ["role", "uint"], 5: ["rank", "uint"], 6: ["world", "uint"],
    8: ["shape", "bytes"], 9: ["layout", "Layout"], 10: ["regions", "Region*"], 11: ["config", "bytes"],
  },
  Region: { 1: ["fd", "uint"], 2: ["size", "uint"] },
  Layout: { 2: ["blocks", "uint"], 3: ["groups", "Group*"], 4: ["segments", "Segment*"] },
  Group: { 1: ["blockTokens", "uint"], 2: ["policy", "uint"] },
  Segment: { 2: ["group", "uint"], 3: ["region", "uint"], 4: ["offset", "uint"], 5: ["stride", "uint"], 6: ["bytes", "uint"] },

  MatchRequest: { 1: ["queries", "Query*"] },
  Query: { 3: ["keys", "bytes"], 4: ["computed", "uint"] },
  MatchResponse: { 1: ["matches", "Match*"] },
  Match: { 1: ["tokens", "uint"], 3: ["async", "uint"] },
  Transfer: { 4: ["blocks", "Blocks"] },
  Blocks: { 1: ["keys", "bytes"], 2: ["ids", "int*"], 3: ["groups", "uint*"] },
  Cancel: { 1: ["call", "id"] },
  Empty: {},
};

// The wire types, which say how long a value is.
const VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5;

// How a varint becomes a value, for each type that is one.
const NUMBERS = {
  uint: (n) => Number(n),
  int: (n) => Number(BigInt.asIntN(64, n)), // a negative number is a varint of 10 bytes
  id: (n) => n,
};

/** Malformed says that bytes are no message. */
export class Malformed extends Error {}

class Reader {
  constructor(data) {
    this.data = data;
    this.at = 0;
  }

  get more() {
    return this.at < this.data.length;
  }

  /** varint reads a number: 7 bits a byte, the lowest first; the top bit says that more follow. */
  varint() {
    let value = 0n;
    for (let shift = 0n; shift < 70n && this.more; shift += 7n) {
      const byte = this.data[this.at++];
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return BigInt.asUintN(64, value);
    }
    throw new Malformed("a number has no end");
  }

  take(length) {
    if (length > this.data.length - this.at) throw new Malformed("a field is longer than its message");
    this.at += length;
    return this.data.subarray(this.at - length, this.at);
  }

  /** value reads what a tag announced: a BigInt of a varint, else the bytes. */
  value(wire) {
    if (wire === VARINT) return this.varint();
    if (wire === LENGTH) return this.take(Number(this.varint()));
    if (wire === FIXED64 || wire === FIXED32) return this.take(wire === FIXED64 ? 8 : 4);
    throw new Malformed(`wire type ${wire} is not known`);
  }
}

/** decode reads a message. Fields that are absent have the empty value of their type; a message that is absent is undefined. */
export function decode(name, data) {
  const message = {};
  for (const [field, type] of Object.values(MESSAGES[name])) message[field] = empty(type);
  const reader = new Reader(data);
  while (reader.more) {
    const tag = reader.varint();
    const wire = Number(tag & 7n);
    const value = reader.value(wire);
    const [field, type] = MESSAGES[name][tag >> 3n] ?? [];
    if (field === undefined) continue; // a newer host
    if (!type.endsWith("*")) message[field] = convert(type, wire, value);
    else message[field].push(...elements(type.slice(0, -1), wire, value));
  }
  return message;
}

function empty(type) {
  if (type.endsWith("*")) return [];
  return { uint: 0, int: 0, id: 0n, string: "", bytes: Buffer.alloc(0) }[type];
}

/** elements reads what one tag of a repeated field brings: numbers may be packed, many into one value. */
function* elements(type, wire, value) {
  if (!(type in NUMBERS) || wire !== LENGTH) return yield convert(type, wire, value);
  for (const packed = new Reader(value); packed.more; ) yield NUMBERS[type](packed.varint());
}

function convert(type, wire, value) {
  if (wire !== (type in NUMBERS ? VARINT : LENGTH)) throw new Malformed(`${type} with wire type ${wire}`);
  if (type in NUMBERS) return NUMBERS[type](value);
  if (type === "bytes") return value;
  if (type === "string") return value.toString();
  return decode(type, value);
}

/** encode writes a message. Fields that are absent or empty take no room, as proto3 has it. */
export function encode(name, message) {
  const parts = [];
  for (const [number, [field, type]] of Object.entries(MESSAGES[name])) {
    const value = message[field];
    if (!value || value.length === 0) continue; // undefined, 0, 0n, false, "", []
    if (!type.endsWith("*")) parts.push(encodeField(number, type, value));
    else if (type.slice(0, -1) in NUMBERS) parts.push(lengthField(number, Buffer.concat(value.map(varint))));
    else parts.push(...value.map((v) => encodeField(number, type.slice(0, -1), v)));
  }
  return Buffer.concat(parts);
}

function encodeField(number, type, value) {
  if (type in NUMBERS) return Buffer.concat([varint(number * 8 + VARINT), varint(value)]);
  if (type === "string") return lengthField(number, Buffer.from(value));
  return lengthField(number, type === "bytes" ? value : encode(type, value));
}

function lengthField(number, data) {
  return Buffer.concat([varint(number * 8 + LENGTH), varint(data.length), data]);
}

function varint(value) {
  const bytes = [];
  let rest = BigInt.asUintN(64, BigInt(value));
  for (; rest > 0x7fn; rest >>= 7n) bytes.push(Number(rest & 0x7fn) | 0x80);
  return Buffer.from([...bytes, Number(rest)]);
}
