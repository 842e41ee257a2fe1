// A kvport connector for Node.js: KV blocks as files in one folder.
//
// It speaks the plugin protocol with nothing but the core modules of Node.js, so it shows all that a plugin in
// another language has to do. Read it in this order: this file, handshake.mjs, session.mjs, store.mjs; grpc.mjs
// and protobuf.mjs are what most languages have a library for. docs/protocol.md says what may be relied on.

import { Failure, failed, log, panics } from "./failure.mjs";
import { serveMethods } from "./grpc.mjs";
import { listen, startedByHost } from "./handshake.mjs";
import { Session } from "./session.mjs";
import { SCHEMA, parseConfig } from "./store.mjs";

const NAME = "NodeStoreConnector";
const SCOPE_SHARED = 3; // engines on other machines may see the folder

// What a host must know before it starts us.
const MANIFEST = {
  name: NAME,
  aliases: [],
  version: "1.0.0",
  protocol_versions: [1],
  capabilities: [], // optional powers: none
  environment: [], // variables that we want to see; hosts pass no others
  needs: { writes: ["dir"] }, // fields of our config with paths, for hosts with a sandbox
  scope: "shared",
  config_schema: SCHEMA,
};

// The methods that a plugin serves: the three of kvport.v1.Plugin, and one of go-plugin's own.
const METHODS = {
  // Describe checks a config and says what the connector would do with it.
  "/kvport.v1.Plugin/Describe": async (exchange) => {
    const { config } = await exchange.message("DescribeRequest");
    exchange.send("DescribeResponse", describe(config));
  },
  // Heartbeat answers at once, because nothing here makes the event loop wait.
  "/kvport.v1.Plugin/Heartbeat": async (exchange) => {
    const { sequence } = await exchange.message("HeartbeatRequest");
    exchange.send("HeartbeatResponse", { sequence, panics: panics.count });
  },
  "/kvport.v1.Plugin/Session": (exchange) => new Session(exchange).run(),
  // Shutdown ends the process: its sides are closed. The host hangs up when it has the answer.
  "/plugin.GRPCController/Shutdown": async (exchange) => exchange.send("Empty", {}),
};

function describe(config) {
  try {
    parseConfig(config);
    return { name: NAME, scope: SCOPE_SHARED };
  } catch (error) {
    return failed(error);
  }
}

/** byHand is the program when a person or a script starts it. It returns the exit code. */
function byHand(args) {
  const [option, second, config, ...more] = args;
  if (option !== "--manifest" || more.length > 0 || (second !== undefined && (second !== "--config" || config === undefined))) {
    process.stderr.write(`usage: kvport-nodestore --manifest [--config JSON]\n${NAME} is a kvport plugin: an engine starts it.\n`);
    return 2;
  }
  try {
    if (config !== undefined) parseConfig(config);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    process.stderr.write(error.message + "\n");
    return 2;
  }
  process.stdout.write(JSON.stringify(MANIFEST, null, 2) + "\n");
  return 0;
}

if (startedByHost()) {
  try {
    serveMethods(listen(), METHODS);
  } catch (error) {
    log("error", error.message);
    process.exitCode = 1;
  }
} else {
  process.exitCode = byHand(process.argv.slice(2));
}
