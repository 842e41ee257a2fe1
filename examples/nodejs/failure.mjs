// Failures: errors that the engine can act on. They travel in answers, and their code says what follows.

const CODES = {
  UNSPECIFIED: 0, BUSY: 1, GONE: 2, INCOMPATIBLE: 3, CORRUPT: 4, CANCELED: 5, DEADLINE: 6, PANIC: 7, DECLINED: 8, OUTDATED: 9,
};
const MAX_TEXT = 1000; // characters, which are at most 4 KiB

/** Failure is an error with a code; blocks are the ids that it is limited to, none means all of the call. */
export class Failure extends Error {
  constructor(code, text, blocks = []) {
    super(text);
    this.code = code;
    this.blocks = blocks;
  }
}

/** How many errors were bugs of ours: a host asks with each heartbeat. */
export const panics = { count: 0 };

/** failed makes the answer of a call that threw an error. A bug must not take the process. */
export function failed(error) {
  let code = "UNSPECIFIED"; // what the system says of a file
  if (error instanceof Failure) {
    code = error.code;
  } else if (!error.syscall) {
    code = "PANIC";
    panics.count++;
    log("error", `call failed: ${error.stack}`);
  }
  return { error: { code: CODES[code], message: error.message.slice(0, MAX_TEXT), blocks: error.blocks ?? [] } };
}

/** log writes a line as hosts read it from standard error. */
export function log(level, text) {
  process.stderr.write(JSON.stringify({ "@level": level, "@message": text }) + "\n");
}
