// gRPC on node:http2: a request is a POST, a message is 5 bytes and its encoding, and a status ends the
// answer in trailers. https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md is the whole of it.

import { Malformed, decode, encode } from "./protobuf.mjs";

const MAX_MESSAGE = 16 << 20; // bytes, of either end
const HEADERS = { ":status": 200, "content-type": "application/grpc" };

/** The status codes that a plugin needs. Errors of calls are no status: they travel in answers. */
export const OK = 0, INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8, UNIMPLEMENTED = 12, INTERNAL = 13;

/** Status ends a method with a code other than OK. */
export class Status extends Error {
  constructor(code, text) {
    super(text);
    this.code = code;
  }
}

/**
 * serveMethods answers the requests of an HTTP/2 server. methods are functions by path; each takes an Exchange,
 * and the answer ends when it returns. A method that throws a Status ends it with that.
 */
export function serveMethods(server, methods) {
  server.on("stream", async (stream, headers) => {
    stream.on("error", () => {}); // the host hung up: whoever waits for the stream sees its end
    const method = methods[headers[":path"]];
    let status = new Status(method ? OK : UNIMPLEMENTED, "");
    stream.on("wantTrailers", () => {
      stream.sendTrailers({ "grpc-status": String(status.code), "grpc-message": encodeURIComponent(status.message) });
    });
    stream.respond(HEADERS, { waitForTrailers: true });
    try {
      await method?.(new Exchange(stream));
    } catch (error) {
      status = error instanceof Status ? error : new Status(INTERNAL, String(error));
    }
    if (!stream.closed) stream.end();
  });
}

/** Exchange is one request with its answer. Each way is a stream of messages; a unary method has one each. */
class Exchange {
  constructor(stream) {
    this.stream = stream;
  }

  /** messages gives what the host sends, until it ends or breaks the stream. */
  async *messages(name) {
    let chunks = [], size = 0, want = 5;
    // Who leaves the loop may still answer, so the stream must outlive it.
    for await (const chunk of this.stream.iterator({ destroyOnReturn: false })) {
      chunks.push(chunk);
      size += chunk.length;
      if (size < want) continue;
      let data = Buffer.concat(chunks);
      while (data.length >= (want = frameSize(data))) {
        yield this.decoded(name, data.subarray(5, want));
        data = data.subarray(want);
      }
      [chunks, size] = [[data], data.length];
    }
  }

  decoded(name, data) {
    try {
      return decode(name, data);
    } catch (error) {
      throw error instanceof Malformed ? new Status(INTERNAL, error.message) : error;
    }
  }

  /** message reads the request of a unary method. */
  async message(name) {
    for await (const message of this.messages(name)) return message;
    throw new Status(INTERNAL, "the request has no message");
  }

  /** send writes one message. When the stream is over nobody waits for it. */
  send(name, message) {
    const data = encode(name, message);
    const head = Buffer.alloc(5); // 0: not compressed
    head.writeUInt32BE(data.length, 1);
    if (this.stream.writable) this.stream.write(Buffer.concat([head, data]));
  }
}

/** frameSize is how many bytes the first message of the data takes; 5 while that is not known. */
function frameSize(data) {
  if (data.length < 5) return 5;
  const size = data.readUInt32BE(1);
  if (data[0] !== 0) throw new Status(UNIMPLEMENTED, "messages are not compressed here");
  if (size > MAX_MESSAGE) throw new Status(RESOURCE_EXHAUSTED, `a message has ${size} bytes, limit ${MAX_MESSAGE}`);
  return 5 + size;
}
