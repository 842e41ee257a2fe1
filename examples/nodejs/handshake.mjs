// The handshake of hashicorp/go-plugin: how a host that has started us finds us, and knows that it is us.

import { generateKeyPairSync, randomBytes, sign } from "node:crypto";
import { createSecureServer } from "node:http2";
import { join } from "node:path";

const PROTOCOL = 1; // of kvport
const COOKIE = "b1f0e4a6c7d94b0f9b7e6f4a5d3c2810";

/** startedByHost reports whether a host started this process, and not a person. */
export function startedByHost() {
  return process.env.KVPORT_PLUGIN === COOKIE && process.argv.length === 2;
}

/**
 * listen makes the server, to which only our host can connect, and tells the host on standard output where it is.
 * The process ends when the host hangs up or dies.
 */
export function listen() {
  const offered = (process.env.PLUGIN_PROTOCOL_VERSIONS ?? "none").split(",");
  if (!offered.includes(String(PROTOCOL))) {
    throw new Error(`the host speaks protocol ${offered.join(", ")}, this plugin ${PROTOCOL}`);
  }
  const host = process.env.PLUGIN_CLIENT_CERT;
  if (!host) throw new Error("the host gave no certificate (PLUGIN_CLIENT_CERT)"); // without one anybody could connect
  const { key, certificate } = makeCertificate();
  const server = createSecureServer({
    key, cert: pem(certificate),
    ca: host, requestCert: true, rejectUnauthorized: true, // our host, and nobody else
    maxSessionMemory: 256, // MB
  });
  server.on("error", (error) => {
    process.stderr.write(`kvport-nodestore: it cannot listen: ${error.message}\n`);
    process.exit(1);
  });
  server.on("session", (session) => session.on("close", () => process.exit(0))); // a host connects once
  const path = join(process.env.PLUGIN_UNIX_SOCKET_DIR, "plugin");
  server.listen(path, () => {
    const unpadded = certificate.toString("base64").replace(/=+$/, "");
    process.stdout.write(`1|${PROTOCOL}|unix|${path}|grpc|${unpadded}\n`);
  });
  for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => {}); // meant for the engine, which stops us later
  const parent = process.ppid;
  setInterval(() => process.ppid === parent || process.exit(1), 500); // no host, no plugin
  return server;
}

/** makeCertificate makes a key and a certificate, in DER, for this life of the process. */
function makeCertificate() {
  const { publicKey, privateKey } = generateKeyPairSync("ec", { namedCurve: "P-256" });
  // node:crypto signs, but it makes no certificates. One is a few nested values in DER (RFC 5280, section 4.1).
  const algorithm = der(SEQUENCE, oid("2a8648ce3d040302")); // ecdsa-with-SHA256
  const name = der(SEQUENCE, der(SET, der(SEQUENCE, oid("550403"), der(UTF8, Buffer.from("localhost")))));
  const validity = der(SEQUENCE, der(TIME, utc(new Date(Date.now() - 60_000))), der(TIME, Buffer.from("491231235959Z")));
  const names = der(SEQUENCE, der(DNS_NAME, Buffer.from("localhost"))); // what the host connects to
  const extension = der(SEQUENCE, oid("551d11"), der(OCTETS, names)); // subjectAltName
  const body = der(
    SEQUENCE,
    der(VERSION, der(INTEGER, Buffer.from([2]))), // X.509 version 3
    der(INTEGER, Buffer.concat([Buffer.from([1]), randomBytes(15)])), // serial number
    algorithm, name, validity, name,
    publicKey.export({ type: "spki", format: "der" }),
    der(EXTENSIONS, der(SEQUENCE, extension)),
  );
  const signature = Buffer.concat([Buffer.from([0]), sign("sha256", body, privateKey)]);
  return { key: privateKey.export({ type: "pkcs8", format: "pem" }), certificate: der(SEQUENCE, body, algorithm, der(BITS, signature)) };
}

// The tags of DER that a certificate needs.
const INTEGER = 0x02, BITS = 0x03, OCTETS = 0x04, OID = 0x06, UTF8 = 0x0c, TIME = 0x17, SEQUENCE = 0x30, SET = 0x31;
const DNS_NAME = 0x82, VERSION = 0xa0, EXTENSIONS = 0xa3;

/** der is one value: its tag, its length and what is in it. */
function der(tag, ...parts) {
  const body = Buffer.concat(parts);
  const length = body.length < 0x80 ? [body.length] : [0x82, body.length >> 8, body.length & 0xff];
  if (length[0] === 0x82 && length[1] === 0) length.splice(0, 2, 0x81); // as short as it can be
  return Buffer.concat([Buffer.from([tag, ...length]), body]);
}

function oid(hex) {
  return der(OID, Buffer.from(hex, "hex"));
}

function utc(date) {
  return Buffer.from(date.toISOString().replace(/^..|[-:T]|\.\d+/g, ""));
}

function pem(certificate) {
  return `-----BEGIN CERTIFICATE-----\n${certificate.toString("base64")}\n-----END CERTIFICATE-----\n`;
}
