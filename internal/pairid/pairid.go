// Package pairid is the grammar of request ids that name the two engines of a request:
//
//	___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UNIQUE[_SIGNATURE]
//
// A router sends such a text to both engines as X-Request-Id, and an engine's own id of the request begins with it. Routers, the HTTP
// server and connectors all read ids with Parse. So what one of them takes for signed, or for no id of this kind, is the same to the others.
package pairid

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// Prefix begins every text of this kind.
const Prefix = "___prefill_addr_"

const (
	between = "___decode_addr_"
	address = `((?:[0-9A-Za-z.\-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):[1-9][0-9]{0,4})`
	hex     = `([0-9a-f]{32})`
)

// pattern is the whole id of a request: what a router has sent, in vLLM behind the name of an endpoint and, where one request asks for several
// answers, the number of one (ParentRequest in vllm/v1/engine/parallel_sampling.py), and then what is the engine's own.
var pattern = regexp.MustCompile(`^(?:(?:[0-9]{1,4}_)?(?:cmpl-|chatcmpl-))?(` + Prefix + address + between + address + `_` + hex + `)(?:_` + hex + `)?(?:-[0-9A-Za-z]+)*$`)

// Longest is how many bytes an id has at most that a router sends: two addresses with names of 253 bytes, and a signature.
const Longest = len(Prefix) + len(between) + 2*(253+len(":65535")) + 2*(1+32)

// alone is one address and nothing else.
var alone = regexp.MustCompile(`^` + address + `$`)

// Pair is what an id says. Nothing of it is verified.
type Pair struct {
	Text            string // what a router signs: all but the signature
	Prefill, Decode string // HOST:PORT
	Unique          string // 32 digits that a router gives to one request only
	Signature       string // 32 digits; empty: nobody has signed the text
}

// Parse reads the id that an engine has given to a request. It reads only whole ids: an id with anything before, between or behind the parts
// of the grammar, in other letters or in another encoding, names nobody.
func Parse(id string) (p Pair, ok bool) {
	m := pattern.FindStringSubmatch(id)
	if m == nil || !isAddress(m[2]) || !isAddress(m[3]) {
		return Pair{}, false
	}
	return Pair{Text: m[1], Prefill: m[2], Decode: m[3], Unique: m[4], Signature: m[5]}, true
}

// New is the text that names two engines, for a router to sign: unique is 32 digits of 0-9 and a-f. It is not ok where the grammar has no
// room for an address.
func New(prefill, decode, unique string) (text string, ok bool) {
	text = Prefix + prefill + between + decode + "_" + unique
	p, ok := Parse(text)
	return text, ok && p == Pair{Text: text, Prefill: prefill, Decode: decode, Unique: unique}
}

// IsAddress reports whether an id can name the engine at an address.
func IsAddress(s string) bool { return alone.MatchString(s) && isAddress(s) }

// WantAddress says what an address in an id is.
const WantAddress = "want HOST:PORT, where HOST is letters, digits, dots and hyphens, or an address of IPv6 in brackets without a zone, and PORT is 1 to 65535"

// Problem says why an id that has the prefix names nobody; empty: it names two engines. Of what it quotes a part is enough: the id may be long.
func Problem(id string) string {
	if _, ok := Parse(id); ok {
		return ""
	}
	_, rest, _ := strings.Cut(id, Prefix)
	prefill, rest, found := strings.Cut(rest, between)
	if !found {
		return "it has no " + between
	}
	decode, _, _ := strings.Cut(rest, "_")
	if i := strings.LastIndexByte(rest, ':'); i >= 0 { // the host may have what no host has
		port, _, _ := strings.Cut(rest[i:], "_")
		decode = rest[:i] + port
	}
	for _, one := range [][2]string{{"prefill", prefill}, {"decode", decode}} {
		if !IsAddress(one[1]) {
			return fmt.Sprintf("the address of its %s engine is %+.64q, %s", one[0], one[1], WantAddress)
		}
	}
	return "what is before or behind its addresses belongs to no id: 32 digits of 0-9 and a-f follow them, and then _ with 32 more if a router has signed it"
}

// isAddress reports whether a port is one, and whether what is within brackets is an address of IPv6.
func isAddress(s string) bool {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return false
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return false
	}
	if !strings.HasPrefix(s, "[") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Is6()
}
