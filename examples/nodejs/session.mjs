// A session: one side of one engine rank, on one stream. Each call is answered exactly once, in any order.

import { INVALID_ARGUMENT, Status } from "./grpc.mjs";
import { openSide } from "./store.mjs";
import { Failure, failed } from "./failure.mjs";

const MAX_CALLS = 1024; // that run at once

/** Call is the context of one call: it is done when it was cancelled or its deadline has passed. */
class Call {
  cancelled = false;

  constructor(timeoutUs) {
    this.deadline = timeoutUs ? performance.now() + timeoutUs / 1000 : Infinity;
  }

  /** check throws if the engine waits no longer (rule WORK-07). */
  check() {
    if (this.cancelled) throw new Failure("CANCELED", "the engine cancelled the call");
    if (performance.now() > this.deadline) throw new Failure("DEADLINE", "the deadline of the call has passed");
  }
}

export class Session {
  side = undefined; // after Open
  calls = new Map(); // the calls that run, by id
  running = new Set(); // their promises

  constructor(exchange) {
    this.exchange = exchange;
  }

  /** run serves until Close or the end of the stream. Calls end first, then the side, then Close is answered. */
  async run() {
    let close;
    try {
      for await (const request of this.exchange.messages("SessionRequest")) {
        if (request.close) {
          close = request;
          break;
        }
        await this.accept(request);
      }
    } catch (error) {
      if (error instanceof Status) throw error; // any other: the stream broke, which is an end too
    } finally {
      for (const call of this.calls.values()) call.cancelled = true;
      await Promise.all(this.running); // no call touches the cache any more (rule WORK-04)
    }
    if (close) this.answer(close.id, { closed: {} });
  }

  /** accept starts one call and does not wait for it. A host that breaks the protocol loses the stream. */
  async accept(request) {
    if (request.cancel) {
      const call = this.calls.get(request.cancel.call);
      if (call) call.cancelled = true; // it answers all the same
      return;
    }
    const kind = Object.keys(request).find((field) => typeof request[field] === "object");
    if (!kind || !request.id || this.calls.has(request.id) || (kind === "open") === Boolean(this.opening)) {
      throw new Status(INVALID_ARGUMENT, `call ${request.id}: unexpected ${kind ?? "kind of call"}`);
    }
    if (this.calls.size >= MAX_CALLS) {
      this.answer(request.id, failed(new Failure("BUSY", `${MAX_CALLS} calls are running`)));
      return;
    }
    this.opening = true;
    const call = new Call(request.timeoutUs);
    this.calls.set(request.id, call);
    const done = this.serve(request, kind, call);
    this.running.add(done);
    done.then(() => this.running.delete(done));
    if (kind === "open") await done; // nothing else can run before
  }

  /** serve runs one call and answers it, once. */
  async serve(request, kind, call) {
    let answer;
    try {
      call.check();
      if (kind === "open") {
        this.side = await openSide(request.open);
        answer = { opened: {} };
      } else if (this.side) {
        answer = await this.side.serve(kind, request[kind], call);
      } else {
        throw new Failure("GONE", "the side did not open");
      }
    } catch (error) {
      answer = failed(error);
    }
    this.calls.delete(request.id);
    this.answer(request.id, answer);
  }

  answer(id, answer) {
    this.exchange.send("SessionResponse", { id, ...answer });
  }
}
